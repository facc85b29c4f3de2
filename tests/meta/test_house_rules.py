# SPDX-License-Identifier: Apache-2.0
"""Rules of the house that a script can check: licence lines, sizes, where a method may be named, layers."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from speccompile.core.registry import BACKENDS, METHODS

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "speccompile").rglob("*.py"))
ALL = sorted([*PACKAGE, *(p for top in ("tests", "bench", "examples") for p in (ROOT / top).rglob("*.py"))])
# "none" is also a quantisation and an absent value, so its name does not identify it.
NAMED_METHODS = sorted(set(METHODS) - {"none"})


@pytest.fixture(scope="module")
def trees():
    """Returns {module of the package: its syntax tree}."""
    return {path: ast.parse(path.read_text()) for path in PACKAGE}


def short(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


def test_every_module_begins_with_its_licence():
    lines = {path: path.read_text().splitlines()[:2] for path in ALL}
    assert short(path for path, head in lines.items() if "# SPDX-License-Identifier: Apache-2.0" not in head) == []


def test_every_module_of_the_package_says_what_it_is_for(trees):
    assert short(path for path, tree in trees.items() if not ast.get_docstring(tree)) == []


def test_a_module_that_runs_runs_last(trees):
    """What stands after it has no meaning in a child process."""
    early = [p for p, tree in trees.items() if any("__main__" in ast.dump(node) for node in tree.body[:-1])]
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
        for node in ast.walk(tree):
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            blanket = isinstance(node, ast.ExceptHandler) and (
                node.type is None
                or (isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"})
            )
            if relative or blanket:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize("method", NAMED_METHODS)
def test_a_method_is_named_only_in_its_folder_and_in_the_registry(method):
    home = ROOT / "speccompile/speculators" / method
    others = [path for path in PACKAGE if home not in path.parents]
    # Llama-like layers have a part self.mlp (or module.mlp) with weights called mlp.gate_proj and so on; files
    # have parts of other names too, which patterns of keys name with an escaped dot after them. "-" stands for one in
    # Nemotron-H's pattern of layers; configs call layers with attention and a mixer hybrid.
    parts = r"\.(\{|gate\b|router|experts|shared_expert|(gate|up|gate_up|down)_proj|c_fc|c_proj)"
    # A path has a suffix; so has a request of OpenAI's.
    others_of = {"suffix": r"(?:(?<!\.)|(?<=speculators\.))", "hybrid": r"(?<!\"conv\", \")"}
    before = others_of.get(method, r"(?<!self\.)(?<!module\.)(?<!.-.: .)")
    pattern = re.compile(rf"{before}\b{method}\b(?!\\\.|{parts}|\": NoOp)")
    assert short(p for p in others if pattern.search(p.read_text())) == ["speccompile/core/registry.py"]
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
