# SPDX-License-Identifier: Apache-2.0
"""The pages stay short, sorted by purpose, linked, and name the packages in the order of the import contract."""

import inspect
import re
import signal
import tomllib
from pathlib import Path

import pytest

from speccompile import errors
from speccompile.backends.base import Backend, EngineBase
from speccompile.checkpoints.config_values import _REFUSED, check_config
from speccompile.cli.main import _EPILOG
from speccompile.core.protocols import Engine
from speccompile.core.registry import load_formats
from speccompile.doctor.doctor import KNOWN
from speccompile.errors import ExportError
from tests.export.families import CONFIGS, GEMMA4
from tests.export.hybrids import HYBRIDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MAX_WORDS = 35_000  # of all pages but the laboratory notes
# Groups are folders of docs/; "" has the pages outside of a folder. Reference has the most, as it says everything once.
MAX_GROUP_WORDS = {"": 2_100, "tutorials": 3_000, "how_to": 6_100, "reference": 20_800, "explanation": 3_800}
MAX_LINE = 400
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] != "lab")


def group_of(page):
    return page.relative_to(DOCS).parts[0] if page.parent != DOCS else ""


def num_words(page):
    """Returns the words of a page as `wc -w` counts them, the bars of tables included."""
    return len(page.read_text().split())


def slug(heading):
    """Returns the anchor of a heading as Python-Markdown makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text.encode("ascii", "ignore").decode()).strip().lower())


def anchors_of(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def test_all_pages_together_stay_short():
    assert sum(map(num_words, PAGES)) <= MAX_WORDS


@pytest.mark.parametrize("group", MAX_GROUP_WORDS)
def test_a_group_stays_short(group):
    assert sum(num_words(page) for page in PAGES if group_of(page) == group) <= MAX_GROUP_WORDS[group]


def test_every_page_is_in_a_group():
    assert {group_of(page) for page in PAGES} == set(MAX_GROUP_WORDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_no_line_is_long(page):
    lengths = {number: len(line) for number, line in enumerate(page.read_text().splitlines(), 1)}
    assert {number: length for number, length in lengths.items() if length > MAX_LINE} == {}


def test_every_anchor_of_a_link_is_a_heading():
    broken = []
    for page in (*PAGES, *(DOCS / "lab").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for link, anchor in re.findall(r"\]\(([^)#\s:]*\.md|)#([^)\s]+)\)", page.read_text()):
            target = page.parent / link if link else page
            if target.exists() and anchor not in anchors_of(target):
                broken.append(f"{page.relative_to(ROOT)}: {link}#{anchor}")
    assert broken == []


REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs/explanation/architecture.md").read_text()
ROWS = re.findall(r"^\| `([a-z_]+)(?:/|\.py)` \| \S", PAGE, re.MULTILINE)


def test_each_package_and_no_other_has_its_line():
    package = REPO / "speccompile"
    names = {path.parent.name for path in package.glob("*/__init__.py")}
    names |= {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")}
    assert sorted(ROWS) == sorted(names)


@pytest.fixture(scope="module")
def layers():
    """Returns the packages of each layer, sorted, from the highest layer to the lowest."""
    contracts = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [sorted(re.findall(r"speccompile\.(\w+)", row)) for row in rows]


def test_lines_stand_in_the_order_of_the_layers(layers):
    rows = iter(ROWS)
    assert [sorted(next(rows) for _ in layer) for layer in layers] == layers


def test_contributing_names_the_layers_in_their_order(layers):
    order = ", ".join(" and ".join(layer) for layer in layers)
    assert f"Imports point down: {order}." in (REPO / "CONTRIBUTING.md").read_text()


def test_the_life_of_a_request_has_ten_sentences_that_name_what_is_there():
    life = PAGE.partition("## The life of a request")[2]
    assert re.findall(r"^(\d+)\. ", life, re.MULTILINE) == [str(number) for number in range(1, 11)]
    for path in re.findall(r"`((?:runtime|serving)/[\w/.]+)`", life):
        assert (REPO / "speccompile" / path).exists(), path


DOCTOR_PAGE = (Path(__file__).parents[2] / "docs/reference/doctor.md").read_text()


def rows_of_doctor(heading):
    section = DOCTOR_PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([a-z0-9_./]+)` \|", section, re.MULTILINE)


def test_the_page_has_every_layout():
    assert sorted(rows_of_doctor("Layouts")) == sorted(layout.name for layout in load_formats())


def test_the_page_has_every_check():
    named = {check.name for layout in load_formats() for check in layout.checks}
    assert sorted(rows_of_doctor("Checks")) == sorted({"files", "format"} | named)


def test_the_page_names_what_is_known_only():
    line = next(line for line in DOCTOR_PAGE.splitlines() if line.startswith("Known but not supported yet"))
    names = line.partition(": ")[2].lower().replace("-", "").strip(".").split(", ")
    assert sorted(names) == sorted(known.name for known in KNOWN)


FAMILIES_PAGE = (Path(__file__).parents[2] / "docs/reference/families.md").read_text()
SUPPORTED, _, REFUSED = FAMILIES_PAGE.partition("## What is refused")


def test_every_family_on_the_page_is_tested_and_the_other_way_round():
    promised = re.findall(r"^\| [^|]+ \| `([a-z0-9_]+)` \|", SUPPORTED, re.MULTILINE)
    promised.remove("model_type")  # the head of the table
    assert len(set(promised)) == len(promised)
    tested = (*CONFIGS.values(), *GEMMA4.values(), *HYBRIDS.values())
    assert set(promised) == {config["model_type"] for config in tested}


def test_every_architecture_called_refused_is_refused():
    names = set(re.findall(r"`([a-z0-9_-]+)`", REFUSED.partition("| refused for |")[2])) & set(_REFUSED)
    assert names == set(_REFUSED)
    for name in names:
        with pytest.raises(ExportError, match="cannot be exported"):
            check_config({"model_type": name}, max_seq_len=16)


CLI_PAGE = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()


def test_every_error_has_an_exit_code_of_its_own_and_a_row():
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.SpecCompileError)]
    codes = sorted(c.exit_code for c in classes)
    assert codes == list(range(1, len(classes) + 1))
    rows = [int(code) for code in re.findall(r"^\| (\d+) \|", CLI_PAGE, re.MULTILINE)]
    assert rows == [0, *codes, 128 + signal.SIGINT, 128 + signal.SIGTERM]


def test_help_names_every_exit_code_of_the_page():
    rows = re.findall(r"^\| (\d+) \|", CLI_PAGE, re.MULTILINE)
    assert [code for code in rows if not re.search(rf"\b{code} [a-z]", _EPILOG)] == []


BACKEND_PAGE = (Path(__file__).parents[2] / "docs/how_to/add_backend.md").read_text()
ENGINE_HEADING = "## What an engine promises"


def rows(heading):
    """Cells of the table below a heading, the head left out."""
    section = BACKEND_PAGE.partition(f"{heading}\n")[2].partition("\n#")[0]
    table = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def public(owner):
    return {name: value for name, value in vars(owner).items() if not name.startswith("_")}


def call(name, method):
    names = [name for name in inspect.signature(method).parameters if name != "self"]
    return f"{name}({', '.join(names)})"


def methods(owner):
    return {call(name, value) for name, value in public(owner).items() if inspect.isfunction(value)}


def test_the_page_has_every_attribute_of_a_backend_with_its_default():
    listed = {name.strip("`"): default.strip("`") for name, default, _ in rows("### Attributes")}
    known = inspect.get_annotations(Backend)
    assert listed == {name: repr(getattr(Backend, name)) if hasattr(Backend, name) else "none" for name in known}


def test_the_page_has_every_method_of_a_backend_with_its_arguments():
    listed = rows("### Methods")
    assert {cells[0].strip("`") for cells in listed} == methods(Backend)
    without_default = {cells[0].strip("`").partition("(")[0] for cells in listed if len(cells) == 2 or not cells[2]}
    assert without_default == Backend.__abstractmethods__


def test_the_page_has_every_member_of_an_engine():
    listed = {name for cells in rows(ENGINE_HEADING) for name in re.findall(r"`([^`]+)`", cells[0])}
    attributes = {name for name, value in public(Engine).items() if isinstance(value, property)}
    assert listed == methods(Engine) | attributes | set(inspect.get_annotations(Engine))


def test_the_base_of_engines_has_what_the_page_leaves_to_it():
    text = BACKEND_PAGE.partition(ENGINE_HEADING)[2]
    named = re.search(r"writes (.*?);", text).group(1)
    missing = set(public(Engine)) - set(dir(EngineBase)) | EngineBase.__abstractmethods__
    assert set(re.findall(r"`(\w+)`", named)) == {n for n in missing if not n.startswith("_")}


def test_every_benchmark_is_listed():
    scripts = {path.stem for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text()}
    assert "planner" in scripts and scripts <= set(re.findall(r"`(\w+)\.py", (ROOT / "bench/README.md").read_text()))
