# SPDX-License-Identifier: Apache-2.0
"""The pages stay short, sorted by purpose, linked, and name the packages in the order of the import contract."""

import re
import tomllib
from pathlib import Path

import pytest

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
