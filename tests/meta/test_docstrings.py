# SPDX-License-Identifier: Apache-2.0
"""Docstrings say what the signature does not.

An entry of `Args` has a unit, a shape, a range or five useful words. An override and a short private function have no
docstring but for a result, a shape or a reason. A long function has one.
"""

import ast
import re

import pytest

from tests.meta.sources import PACKAGE, ROOT, definitions

LONG = 12  # lines of a public function that needs a docstring
SHORT = 15  # lines below which a private function needs none: one line may give a shape or a reason
MOST_LINES = 8_000  # of docstrings in the package
MOST_SHORT = 60  # private functions below `SHORT` that have one
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


def useless(nodes):
    """Returns the names of functions and classes with an entry that says nothing new."""
    return [
        node.name
        for node, _, text in documented(nodes)
        if not isinstance(node, ast.Module) and any(not is_useful(entry) for entry in entries(text))
    ]


def undescribed(nodes):
    """Returns the names of long public functions without a docstring, methods excepted: they may be overrides."""
    functions = [node for node in nodes[0].body if isinstance(node, FUNCTIONS)]
    return [
        node.name
        for node in functions
        if not node.name.startswith("_") and node.end_lineno - node.lineno > LONG and ast.get_docstring(node) is None
    ]


def documented(nodes):
    """Yields (node, lines of its docstring, its text) of everything that has a docstring."""
    for node in nodes:
        if text := ast.get_docstring(node):
            yield node, node.body[0].end_lineno - node.body[0].lineno + 1, text


def short_private(nodes):
    """Returns (name, lines of the docstring) of private functions below `SHORT` lines with a docstring."""
    for node, lines, _ in documented(nodes):
        is_private = isinstance(node, FUNCTIONS) and node.name.startswith("_") and not node.name.startswith("__")
        if is_private and node.end_lineno - node.lineno + 1 - lines < SHORT:
            yield node.name, lines


def talkative(nodes):
    """Returns the names of short private functions with a docstring of a summary and more than two other lines."""
    return [name for name, lines in short_private(nodes) if lines > 5]


def empty(nodes):
    """Returns the docstrings that only name another object."""
    return [text for *_, text in documented(nodes) if re.fullmatch(r"See `[^`]+`\.", text)]


def bases_of(name, classes, seen=()):
    """Yields the class definitions of the package that a class inherits from, by their names alone."""
    for base in classes[name].bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        other = getattr(base, "id", getattr(base, "attr", ""))
        if other in classes and other not in (name, *seen):
            yield classes[other]
            yield from bases_of(other, classes, (*seen, name))


def overrides(classes):
    """Returns "Class.method" of overrides with a docstring, without a result of its own, beside their base's."""
    found = []
    for name, node in classes.items():
        inherited = {
            method.name
            for base in bases_of(name, classes)
            for method in base.body
            if isinstance(method, FUNCTIONS) and ast.get_docstring(method)
        }
        for method in node.body:
            text = isinstance(method, FUNCTIONS) and ast.get_docstring(method)
            if text and method.name in inherited and "Returns:" not in text:
                found.append(f"{name}.{method.name}")
    return found


def classes_of(modules):
    """Returns the class definitions by name; of one name the last counts."""
    return {node.name: node for nodes in modules for node in nodes if isinstance(node, ast.ClassDef)}


@pytest.fixture(scope="module")
def package():
    """Returns {module: its definitions}."""
    return {str(path.relative_to(ROOT)): definitions(path.read_text()) for path in PACKAGE}


@pytest.mark.parametrize("rule", [useless, undescribed, talkative, empty], ids=lambda rule: rule.__name__)
def test_docstrings_help(package, rule):
    found = {path: rule(nodes) for path, nodes in package.items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_overrides_inherit_docstrings(package):
    assert overrides(classes_of(package.values())) == []


def test_docstrings_stay_few(package):
    assert sum(lines for nodes in package.values() for _, lines, _ in documented(nodes)) <= MOST_LINES
    assert sum(1 for nodes in package.values() for _ in short_private(nodes)) <= MOST_SHORT


def test_rules_find_what_they_are_for():
    says_nothing = '''def f(request):
    """Do it.

    Args:
        request: of the
            client.
    """
'''
    says_range = says_nothing.replace("client", "client, at most 4")
    assert useless(definitions(says_nothing)) == ["f"]
    assert useless(definitions(says_range)) == []
    assert undescribed(definitions("def f():\n" + "    x = 1\n" * (LONG + 1))) == ["f"]
    assert undescribed(definitions("def f():\n" + "    x = 1\n" * LONG)) == []


def test_rules_find_needless_docstrings():
    private = 'def _f():\n    """One.\n\n    Two.\n    Three.\n    Four.\n    """\n    return 1\n'
    assert talkative(definitions(private)) == ["_f"]
    assert talkative(definitions(private.replace("_f", "f"))) == []
    assert talkative(definitions('def _f():\n    """One."""\n')) == []
    assert talkative(definitions(private + "    x = 1\n" * SHORT)) == []
    assert empty(definitions('class A:\n    """See `B`."""\n')) == ["See `B`."]
    assert empty(definitions('class A:\n    """See `B`; it is large."""\n')) == []
    base = 'class A:\n    def f(self):\n        """Run."""\n'
    override = base.replace("class A", "class B(A)")
    assert overrides(classes_of(map(definitions, [base, override]))) == ["B.f"]
    assert (
        overrides(
            classes_of(map(definitions, [base, override.replace("Run.", "Run.\n\n        Returns:\n            1.")]))
        )
        == []
    )
    assert overrides(classes_of(map(definitions, [base, override.replace("def f", "def g")]))) == []
