# SPDX-License-Identifier: Apache-2.0
"""No modules of the package import each other in a circle, inside functions and for type checking included."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imports_of(text, modules):
    """Returns the `modules` that a source text imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
    return found & modules.keys()


def circle_in(texts):
    """Returns the modules of one circle in order, the first one again as the last; [] where there is none."""
    graph = {name: imports_of(text, texts) - {name} for name, text in texts.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as fault:
        return fault.args[1]
    return []


def test_the_package_has_no_circle():
    texts = {}
    for path in (ROOT / "speccompile").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        texts[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    assert len(texts) > 400
    assert circle_in(texts) == []


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
    assert set(circle_in(texts)) == {"p.a", "p.b", "p.c"}
    assert circle_in({**texts, "p.c": "import other"}) == []
