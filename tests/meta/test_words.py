# SPDX-License-Identifier: Apache-2.0
"""Retired words stay out of names, comments, docstrings and pages: each has a word that the field uses."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("speccompile", "plugins", "docs", "tests", "bench", "examples")
PAGES = ("README.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".md", ".cuh", ".cpp", ".h"}

# Found with their endings in prose and, word by word, in snake_case and CamelCase names.
WORDS = {
    "law": "probs or distribution",
    "guess": "candidate or draft token",
    "behind": "after, or child of",
    "lest": "so that ... not",
    "of late": "recently",
    "lent": "shared",
    "loan": "cache reference",
    "lender": "owner",
    "flavour": "variant",
    "flavor": "variant",
    "shim": "import helper",
    "own policy": "method default",
}
# Whole names only: as words of a sentence they are fine.
NAMES = {
    "HomeRate": "SharedPrior",
    "Calibration": "AcceptanceEstimate",
    "Reach": "accepted length",
    "Unlimited": "without limit",
    "PlainGuard": "the comparison with plain decoding",
    "Shaper": "LogitsProcessor",
    "judge_shaped": "verify on host",
    "take_over": "reset",
    "old_rules": "trtllm compatibility",
    "Piece": "StepOutput",
    "Ticket": "RequestHandle",
}
# The same in Python alone: pages quote logs, and C++'s comments cannot be told from its names.
PYTHON_NAMES = {
    "place": "slot, position, node or path",
    "places": "slots, positions, nodes or paths",
    "make_slot": "make_sequence",
    "make_slots": "make_sequences",
    "SlotStats": "SequenceStats",
}
_WORDS = {word: re.compile(rf"(?<![^\W\d_]){word}(e?s|ed|ing)?(?![^\W\d_])", re.IGNORECASE) for word in WORDS}
_NAMES = {name: re.compile(rf"(?<!\w)_?{name}(?!\w)") for name in {**NAMES, **PYTHON_NAMES}}
_PROSE = re.compile(r"\b(?:in|[Tt]he|its|their) place\b")  # of most files that have the word: they need no tokens
_JOINTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_")


def _python_parts(text):
    """Yields (line, name or None, text) of the names, comments and docstrings of a module."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.COMMENT):
            yield token.start[0], token.string if token.type == tokenize.NAME else None, token.string
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number in range(node.lineno, node.end_lineno + 1):
                yield number, None, lines[number - 1]


def _other_parts(text, suffix):
    """Yields the same of a page, whose names are its code spans, or of a C++ file, in which all is searched."""
    for number, line in enumerate(text.splitlines(), 1):
        yield number, " ".join(re.findall(r"`[^`]+`", line)) if suffix == ".md" else line, line


def faults(text, suffix, where):
    """Returns "FILE:LINE: 'word': say another" for every retired word in a file's text, by line."""
    lowered, names = text.lower(), {**NAMES, **PYTHON_NAMES} if suffix == ".py" else NAMES
    words = [word for word in WORDS if any(word.replace(" ", joint) in lowered for joint in (" ", "_", ""))]
    code = _PROSE.sub("", text)
    whole = [name for name in names if name in code and _NAMES[name].search(code)]
    found = set(_slots_as_objects(text)) if suffix == ".py" else set()
    if words or whole:
        for number, name, part in _python_parts(text) if suffix == ".py" else _other_parts(text, suffix):
            for word in words:
                found |= {(number, match[0], WORDS[word]) for match in _WORDS[word].finditer(_JOINTS.sub(" ", part))}
            for known in whole:
                found |= {(number, match[0], names[known]) for match in _NAMES[known].finditer(name or "")}
    return [f"{where}:{number}: {word!r}: say {say}" for number, word, say in sorted(found)]


def _slots_as_objects(text):
    """Yields the same where something is read of a `slot`: it is an index, and what is decoded in it a sequence."""
    if re.search(r"\bslot\.[a-z_]", text):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "slot":
                yield node.lineno, f"slot.{node.attr}", f"sequence.{node.attr}"


def _files():
    for folder in FOLDERS:
        yield from sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES and path.is_file())
    yield from (ROOT / page for page in PAGES)


def test_no_retired_word_is_used():
    found = [
        fault for path in _files() for fault in faults(path.read_text(), path.suffix, path.relative_to(ROOT).as_posix())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("suffix", "text", "words"),
    [
        (".py", "draft_law = 1", ["law"]),
        (".py", "class LawTable: pass", ["Law"]),
        (".py", "x = 1  # guessed", ["guessed"]),
        (".py", 'def f():\n    """A node behind\n    the lender."""', ["behind", "lender"]),
        (".py", "class Piece: pass", ["Piece"]),
        (".py", "# a piece of text, a flaw, laughing lawlessly\nx = 'behind'", []),
        (".md", "A shim for `take_over`.", ["shim", "take_over"]),
        (".md", "Servers take over. Reach them.", []),
        (".py", "for place, _places in enumerate(y):\n    f(place=x)", ["_places", "place", "place"]),
        (".py", "# written in place, two places\nplaced = in_place = 'place'", []),
        (".py", "n = len(slot.tokens) + slot + batch.slot.tokens  # slot.x\nx = 'slot.y'", ["slot.tokens"]),
        (".md", "Caches stay `in place`.", []),
        (".h", "float* place = sums;  // written in place", []),
        (".cuh", "// one law\nstruct Shaper {};", ["law", "Shaper"]),
    ],
)
def test_words_are_found_where_they_are_used(suffix, text, words):
    found = faults(text, suffix, "file")
    assert [re.search(r"'([\w.]+)'", fault)[1] for fault in found] == words


def test_a_message_names_the_line_and_the_other_word():
    assert faults("\nlaw = 1", ".py", "a/b.py") == ["a/b.py:2: 'law': say probs or distribution"]
