# SPDX-License-Identifier: Apache-2.0
"""What a test needs, as markers: from the imports of its module, from `pytestmark`, or from its fixtures.

A test without a marker needs numpy and little time; `make check` runs those. See tests/README.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent

MARKERS = {
    "distribution": "statistics: thousands of random draws or steps",
    "export": "runs torch or transformers: exports, trains or loads a checkpoint",
    "plan": "compiles kernels (g++, nvcc) or builds TensorRT-RTX plans",
    "mutant": "breaks the kernels, or a rule, on purpose and expects the tests to notice",
    "fuzz": "tries many mutated documents",
    "live": "starts servers, browsers or other child processes that take seconds",
}

# A module that imports one of these when it is loaded, itself or through a helper under tests/, has the marker.
IMPORTS = {"torch": "export", "transformers": "export", "tests.fuzz.mutate": "fuzz"}

FIXTURES = {
    "chat_bundle": ("export", "live"),
    "compiled": ("export",),
    "e2e_folder": ("export",),
    "int8_pair": ("export",),
    "live": ("live",),
    "neutral": ("export",),
    "pair": ("export",),
}

# Statements at the left margin alone: what a function imports, its test pays for.
_IMPORT = re.compile(r"^(?:import ([\w.]+)|from ([\w.]+) import (\([^)]*\)|.*))", re.MULTILINE)
_NEEDED = re.compile(r"^\S.*importorskip\(.*", re.MULTILINE)
_MARKS = re.compile(r"^pytestmark = (\[[^\]]*\]|.*)", re.MULTILINE)
_MARK = re.compile(r"pytest\.mark\.(\w+)")


@cache
def markers_of_module(path: Path) -> frozenset[str]:
    """Returns the markers of every test of a file under tests/, which is not imported for that.

    They are those of its imports and its `pytestmark`, and those of the `conftest.py` of its folders.
    """
    files = [path, *(folder / "conftest.py" for folder in path.parents if TESTS in folder.parents)]
    texts = [file.read_text() for file in files if file.exists()]
    named = {name for text in texts for marks in _MARKS.findall(text) for name in _MARK.findall(marks)}
    imported = {name for file in files if file.exists() for name in _imports_of(file)}
    return frozenset((named & MARKERS.keys()) | {IMPORTS[name] for name in IMPORTS.keys() & imported})


def _imports_of(path: Path) -> set[str]:
    """Returns the modules that a file and the helpers under tests/ that it imports name at the left margin."""
    seen, waiting = set[str](), [path]
    while waiting:
        for name in _direct_imports(waiting.pop()):
            if name not in seen:
                seen.add(name)
                helper = TESTS.parent / f"{name.replace('.', '/')}.py"
                if name.startswith("tests.") and helper.exists():
                    waiting.append(helper)
    return seen


@cache
def _direct_imports(path: Path) -> frozenset[str]:
    def names() -> Iterator[str]:
        text = path.read_text()
        for line in _NEEDED.findall(text):
            yield from re.findall(r"importorskip\(\"([\w.]+)\"", line)
        for module, package, members in _IMPORT.findall(text):
            yield (module or package).partition(".")[0]
            yield module or package
            yield from (f"{package}.{name}" for name in re.findall(r"\w+", members))

    return frozenset(names())


def markers_of(path: Path, fixtures: Iterable[str] = ()) -> frozenset[str]:
    """Returns the names of the markers that a test gets from its file under tests/ and from its fixtures."""
    return markers_of_module(path).union(*(FIXTURES.get(name, ()) for name in fixtures))
