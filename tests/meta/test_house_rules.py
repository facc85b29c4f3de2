# SPDX-License-Identifier: Apache-2.0
"""Rules of the house that a script can check: licence lines, sizes, names of methods, layers, circles, markers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from speccompile.core.registry import BACKENDS, METHODS
from tests import tiers
from tests.meta.sources import PACKAGE, ROOT, statements

ALL = sorted([*PACKAGE, *(p for top in ("tests", "bench", "examples") for p in (ROOT / top).rglob("*.py"))])
# "none" is also a quantisation and an absent value, so its name does not identify it.
NAMED_METHODS = sorted(set(METHODS) - {"none"})


@pytest.fixture(scope="module")
def texts():
    """Returns {module of the package: its text}."""
    return {path: path.read_text() for path in PACKAGE}


@pytest.fixture(scope="module")
def trees(texts):
    """Returns {module of the package: its syntax tree}."""
    return {path: ast.parse(text) for path, text in texts.items()}


def short(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


def test_every_module_begins_with_its_licence():
    lines = {path: path.read_text().splitlines()[:2] for path in ALL}
    assert short(path for path, head in lines.items() if "# SPDX-License-Identifier: Apache-2.0" not in head) == []


def test_every_module_of_the_package_says_what_it_is_for(trees):
    assert short(path for path, tree in trees.items() if not ast.get_docstring(tree)) == []


def test_a_module_that_runs_runs_last(texts, trees):
    """What stands after it has no meaning in a child process."""
    runs = [path for path, text in texts.items() if "__main__" in text]
    early = [path for path in runs if any("__main__" in ast.dump(node) for node in trees[path].body[:-1])]
    assert short(early) == []


def test_no_module_is_longer_than_400_lines():
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in ALL}
    assert {name: size for name, size in sizes.items() if size > 400} == {}


def test_core_stays_small():
    """What methods share at decode time belongs into drafting/, what declares a kind of graph into graph_kinds/."""
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "speccompile" / "core").glob("*.py")) <= 2400


def test_there_is_no_relative_import_and_no_blanket_except(trees):
    found = []
    for path, tree in trees.items():
        for node in statements(tree):
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            blanket = isinstance(node, ast.ExceptHandler) and (
                node.type is None
                or (isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"})
            )
            if relative or blanket:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize("method", NAMED_METHODS)
def test_a_method_is_named_only_in_its_folder_and_in_the_registry(texts, method):
    home = ROOT / "speccompile/speculators" / method
    others = [path for path, text in texts.items() if method in text and home not in path.parents]
    # Llama-like layers have a part self.mlp (or module.mlp) with weights called mlp.gate_proj and so on; files
    # have parts of other names too, which patterns of keys name with an escaped dot after them. "-" stands for one in
    # Nemotron-H's pattern of layers; configs call layers with attention and a mixer hybrid.
    parts = r"\.(\{|gate\b|router|experts|shared_expert|(gate|up|gate_up|down)_proj|c_fc|c_proj)"
    # A path has a suffix; so has a request of OpenAI's.
    others_of = {"suffix": r"(?:(?<!\.)|(?<=speculators\.))", "hybrid": r"(?<!\"conv\", \")"}
    before = others_of.get(method, r"(?<!self\.)(?<!module\.)(?<!.-.: .)")
    pattern = re.compile(rf"{before}\b{method}\b(?!\\\.|{parts}|\": NoOp)")
    assert short(p for p in others if pattern.search(texts[p])) == ["speccompile/core/registry.py"]
    # Each registry line has the name as its key and in its module path.
    lines = (ROOT / "speccompile/core/registry.py").read_text().splitlines()
    assert {len(pattern.findall(line)) for line in lines} == {0, 2}


@pytest.mark.parametrize("name", sorted([*METHODS, *BACKENDS]))
def test_a_registered_name_has_its_folder(name):
    folder = "speculators" if name in METHODS else "backends"
    assert (ROOT / "speccompile" / folder / name / "__init__.py").is_file()


def test_import_contracts_are_kept():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 kept, 0 broken" in done.stdout


def test_nothing_of_a_machine_is_written_into_the_project():
    pages = [p for p in ROOT.rglob("*.md") if not any(part.startswith(".venv") for part in p.parts)]
    files = [*pages, *(p for p in ALL if p != Path(__file__))]
    pattern = re.compile(r"(?<![\w.])/(work|root|home)/\w")
    assert short(path for path in files if pattern.search(path.read_text())) == []


TESTS = Path(__file__).parents[1]


def test_every_fixture_that_gives_a_marker_exists() -> None:
    sources = "".join(path.read_text() for path in TESTS.rglob("conftest.py"))
    assert [name for name in tiers.FIXTURES if f"def {name}(" not in sources] == []
    used = {marker for markers in tiers.FIXTURES.values() for marker in markers}
    assert used | set(tiers.IMPORTS.values()) <= set(tiers.MARKERS)


def test_the_readme_of_the_tests_explains_every_marker() -> None:
    explained = re.findall(r"^\| `(\w+)` \|", (TESTS / "README.md").read_text(), re.MULTILINE)
    assert sorted(explained) == sorted(tiers.MARKERS)


@pytest.mark.parametrize(
    ("path", "fixtures", "expected"),
    [
        ("core/test_tree.py", (), set()),
        ("e2e/test_greedy.py", ("tmp_path",), {"export"}),  # of its folder
        ("passes/test_tensorrt_numbers.py", (), {"export", "plan"}),  # its own
        ("passes/test_attach_candidates.py", ("pair", "live"), {"export", "live"}),  # of fixtures
        ("doctor/test_doctor.py", (), {"export"}),  # of what it imports
        ("fuzz/test_recipes.py", (), {"fuzz"}),
    ],
)
def test_markers_come_from_modules_and_fixtures(path: str, fixtures: tuple[str, ...], expected: set[str]) -> None:
    assert tiers.markers_of(TESTS / path, fixtures) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", {"export"}),
        ("import torch.nn", {"export"}),
        ("from transformers import (\n    AutoConfig,\n)", {"export"}),
        ("from tests.checkpoints import lab_files", {"export"}),  # which imports torch
        ("from tests.checkpoints.lab_files import (\n    save,\n)", {"export"}),
        ("def test():\n    import torch", set()),
        ('torch = pytest.importorskip("torch")', {"export"}),
        ('def test():\n    pytest.importorskip("torch")', set()),
        ("pytestmark = pytest.mark.live", {"live"}),
        ("pytestmark = [\n    pytest.mark.plan,\n    pytest.mark.skipif(True, reason=''),\n]", {"plan"}),
        ("import torchless", set()),
    ],
)
def test_imports_and_marks_are_read(tmp_path: Path, source: str, expected: set[str]) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest\n{source}\n")
    assert tiers.markers_of_module(tmp_path / "test_it.py") == expected


def imports_of(tree, modules):
    """Returns the `modules` that a module imports anywhere."""
    found = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
    return found & modules.keys()


def circle_in(modules):
    """Returns the modules of one circle in order, the first one again as the last; [] where there is none."""
    graph = {name: imports_of(tree, modules) - {name} for name, tree in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as fault:
        return fault.args[1]
    return []


def test_the_package_has_no_circle(trees):
    modules = {}
    for path, tree in trees.items():
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = tree
    assert len(modules) > 400
    assert circle_in(modules) == []


@pytest.mark.parametrize(
    "back",
    [
        "import p.a",
        "from p import a",
        "from p.a import x",
        "def f():\n    from p.a import x",
        "if TYPE_CHECKING:\n    from p.a import x",
    ],
)
def test_a_circle_is_found(back):
    texts = {"p": "", "p.a": "from p.b import y", "p.b": "import p.c", "p.c": back}
    modules = {name: ast.parse(text) for name, text in texts.items()}
    assert set(circle_in(modules)) == {"p.a", "p.b", "p.c"}
    assert circle_in({**modules, "p.c": ast.parse("import other")}) == []
