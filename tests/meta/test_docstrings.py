# SPDX-License-Identifier: Apache-2.0
"""Docstrings say what the signature does not.

An entry of `Args` has a unit, a shape, a range or five useful words; an override has its base's docstring; a long
function has one.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "speccompile").rglob("*.py"))
LONG = 12  # lines of a public function that needs a docstring
USEFUL = 5
FACT = re.compile(
    r"\[|\d|\bms\b|bytes|seconds|None|default|float|int64|int32|dtype|bool|=|<|>|at most|at least|True|False|empty"
)
ENTRY = re.compile(r"[*\w, ]+(?: \([^)]*\))?: (.*)$")
FILLER = """
    a an the of to in is are that as by for per its it where which from with or and on at be has have not no this these
    those their each one so what whose they them if when was were does do than then
"""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_useful(entry):
    """Returns whether an entry of `Args` says something that the signature does not."""
    words = [word for word in re.findall(r"[A-Za-z_`.]+", entry) if word.lower().strip("`.") not in FILLER.split()]
    return bool(FACT.search(entry)) or len(words) >= USEFUL


def entries(docstring):
    """Yields the texts of a docstring's entries of `Args`, each on one line."""
    lines = docstring.splitlines()
    start = next((i for i, line in enumerate(lines) if line.strip() == "Args:"), len(lines))
    block = []
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        if line.startswith("        "):
            block[-1] += " " + line.strip()
        else:
            block.append(line.strip())
    for text in block:
        match = ENTRY.match(text)
        yield match[1] if match else text


def useless(source):
    """Returns the names of functions and classes with an entry that says nothing new."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, (*FUNCTIONS, ast.ClassDef)))
    return [
        node.name for node in nodes if any(not is_useful(entry) for entry in entries(ast.get_docstring(node) or ""))
    ]


def undescribed(source):
    """Returns the names of long public functions without a docstring, methods excepted: they may be overrides."""
    functions = [node for node in ast.parse(source).body if isinstance(node, FUNCTIONS)]
    return [
        node.name
        for node in functions
        if not node.name.startswith("_") and node.end_lineno - node.lineno > LONG and ast.get_docstring(node) is None
    ]


@pytest.mark.parametrize("rule", [useless, undescribed], ids=lambda rule: rule.__name__)
def test_docstrings_help(rule):
    found = {str(path.relative_to(ROOT)): rule(path.read_text()) for path in PACKAGE}
    assert {path: names for path, names in found.items() if names} == {}


def test_rules_find_what_they_are_for():
    says_nothing = '''def f(request):
    """Do it.

    Args:
        request: of the
            client.
    """
'''
    says_range = says_nothing.replace("client", "client, at most 4")
    assert useless(says_nothing) == ["f"]
    assert useless(says_range) == []
    assert undescribed("def f():\n" + "    x = 1\n" * (LONG + 1)) == ["f"]
    assert undescribed("def f():\n" + "    x = 1\n" * LONG) == []
