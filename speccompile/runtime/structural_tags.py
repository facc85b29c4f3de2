# SPDX-License-Identifier: Apache-2.0
"""Structural tags as grammars of llguidance: free text with tags in it, in the older form and in the newer.

The older form becomes `triggered_tags` of the newer one, `{"type": "structural_tag", "format": {...}}`, which has
xgrammar's format types. A part without a JSON schema or a special token is one terminal, which accepts exactly the
texts of the format. At the border of a JSON value or a special token each side is matched as far as it goes. Free text
ends where a tag's end, or a trigger, first occurs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from speccompile.core.sampling_params import WHERE
from speccompile.errors import RuntimeFault

MAX_DEPTH, MAX_REPEAT = 32, 1000  # formats in formats; times
# By type: the names that a format has; those in the second are optional.
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "const_string": (("value",), ()),
    "json_schema": (("json_schema",), ()),
    "regex": (("pattern",), ()),
    "any_text": ((), ()),
    "sequence": (("elements",), ()),
    "or": (("elements",), ()),
    "tag": (("begin", "content", "end"), ()),
    "triggered_tags": (("triggers", "tags"), ("at_least_one", "stop_after_first")),
    "tags_with_separator": (("tags", "separator"), ("at_least_one", "stop_after_first")),
    "optional": (("content",), ()),
    "star": (("content",), ()),
    "plus": (("content",), ()),
    "repeat": (("content", "min", "max"), ()),
}
_ANY, _SOME = "/(?s:.*)/", "/(?s:.+)/"


def lark_from_structural_tag(tag: Any, vocabulary: Any) -> str:
    """Returns a structural tag as a grammar in Lark's syntax.

    Args:
        tag: `{"structures": [{"begin", "schema", "end"}], "triggers": [..]}`, or `{"format": {"type": .., ..}}`.
        vocabulary: `llguidance.LLTokenizer`; texts of its special tokens become those tokens.

    Raises:
        RuntimeFault: it has neither form, or a type or an option that is not known.
        KeyError, TypeError: a structure lacks one of its parts, or is none.
    """
    if not isinstance(tag, dict) or "format" not in tag:
        return _Translation(vocabulary).lark(_format_from_structures(tag))
    if others := sorted(set(tag) - {"type", "format"}):
        _refuse(f"format and {' and '.join(others)}", "format alone", "Leave the others out.")
    return _Translation(vocabulary).lark(tag["format"])


def _refuse(got: str, expected: str, todo: str) -> NoReturn:
    raise RuntimeFault(f"{WHERE} (structural_tag)", got[:300], expected, todo)


def _format_from_structures(tag: Any) -> dict[str, Any]:
    """Returns the older form as a format of the newer one."""
    structures, triggers = (tag.get("structures"), tag.get("triggers")) if isinstance(tag, dict) else (None, None)
    if not structures or not triggers or not all(isinstance(text, str) and text for text in triggers):
        expected = "structures with triggers, or a format"
        _refuse("no structures, or no triggers", expected, "Correct the structural_tag.")
    tags, used = [], list[str]()
    for structure in structures:
        begin, end, schema = structure["begin"], structure["end"], structure["schema"]
        found = [text for text in triggers if begin.startswith(text)]
        if not found:
            got = f"a structure that begins with {begin!r}, which is after no trigger"
            _refuse(got, "a trigger at its beginning", "Name its beginning among the triggers.")
        used.append(min(found, key=len))  # longer ones add nothing
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    return {"type": "triggered_tags", "triggers": list(dict.fromkeys(used)), "tags": tags}


@dataclass(frozen=True)
class _Part:
    """An expression in Lark's syntax."""

    text: str
    is_regular: bool = True  # it may stand in a terminal, with `&` and `~`
    is_open: bool = False  # it ends with free text that only the text after it can end


@dataclass(frozen=True)
class _Mark:
    """A text that ends free text: what stands before its first special token, and the parts from there on."""

    text: str
    special: tuple[_Part, ...] = ()


class _Translation:
    """One format as a grammar; `end` is the text of the tag around it that ends free text, "" where nothing does."""

    def __init__(self, vocabulary: Any) -> None:
        self._vocabulary = vocabulary
        self._lines: list[str] = []

    def lark(self, asked: Any) -> str:
        whole = self._terminal(self._part(asked, "format", "", 0))
        return "\n".join(["%llguidance {}", f"start: {whole}", *self._lines])

    def _part(self, asked: Any, path: str, end: str, depth: int, is_tag: bool = False) -> _Part:
        """Returns a format with the end after it."""
        match self._kind(asked, path, depth, is_tag):
            case "const_string":
                return self._ended(self._literals(_text(asked, "value", path)), end)
            case "json_schema":
                schema = {} if asked["json_schema"] is True else asked["json_schema"]
                _given(schema, isinstance(schema, dict), f"{path}.json_schema", "a schema, an object or true")
                return self._ended(_Part(f"%json {json.dumps(schema)}", False), end)
            case "regex":
                return self._ended(_Part(_regex_literal(_text(asked, "pattern", path))), end)
            case "any_text":
                return self._until(self._mark(end), [self._mark(end)]) if end else _Part(_ANY, is_open=True)
            case "sequence":
                *firsts, last = enumerate(_list(asked, "elements", path))
                parts = [self._limited(element, f"{path}.elements[{at}]", depth + 1) for at, element in firsts]
                return self._join([*parts, self._part(last[1], f"{path}.elements[{last[0]}]", end, depth + 1)])
            case "or":
                elements = enumerate(_list(asked, "elements", path))
                return self._either([self._part(one, f"{path}.elements[{at}]", end, depth + 1) for at, one in elements])
            case "tag":
                begin = self._literals(_text(asked, "begin", path, may_be_empty=True))
                return self._join([begin, self._rest_of_tag(asked, path, end, depth + 1)])
            case "triggered_tags":
                return self._triggered_tags(asked, path, end, depth + 1)
            case "tags_with_separator":
                return self._tags_with_separator(asked, path, end, depth + 1)
            case "optional":
                content = self._part(asked["content"], f"{path}.content", end, depth + 1)
                return self._either([content, self._literals(end)])
            case kind:
                content = self._limited(asked["content"], f"{path}.content", depth + 1)
                times = {"star": "*", "plus": "+"}.get(kind) or _times(asked, path)
                return self._ended(_Part(f"({content.text}){times}", content.is_regular), end)

    def _kind(self, asked: Any, path: str, depth: int, is_tag: bool = False) -> str:
        """Returns the type of a format that has the names of its type."""
        if depth > MAX_DEPTH:
            _refuse(f"formats in {depth} formats", f"{MAX_DEPTH} at most", "Nest them less deeply.")
        _given(asked, isinstance(asked, dict), path, "a format, an object with a type")
        kind = asked.get("type", "tag" if is_tag else None)
        known = ["tag"] if is_tag else list(FORMATS)
        if kind not in known:
            got = f"{path}: {'no type' if kind is None else f'type {kind!r}'}"
            _refuse(got, f"one of {', '.join(known)}", "Write it with these types, or use structured_outputs.grammar.")
        needed, optional = FORMATS[kind]
        for name, value in asked.items():
            if name not in ("type", *needed, *optional) and value not in (None, []):
                names = ", ".join(("type", *needed, *optional))
                _refuse(f"{path}: {name} of {kind}", f"{names} alone", "Leave it out: it is not supported.")
        for name in needed:
            if name not in asked:
                _refuse(f"{path}: {kind} without {name}", ", ".join(needed), f"Add {name}.")
        return str(kind)

    def _terminal(self, part: _Part) -> str:
        if not part.is_regular:
            return part.text
        return self._named(part).text

    def _named(self, part: _Part) -> _Part:
        name = f"{'T' if part.is_regular else 'r'}{len(self._lines)}"
        self._lines.append(f"{name}: {part.text}")
        return _Part(name, part.is_regular, part.is_open)

    def _join(self, parts: Sequence[_Part]) -> _Part:
        texts, are_regular = list[str](), all(part.is_regular for part in parts)
        for is_regular, run in itertools.groupby(parts, key=lambda part: part.is_regular):
            text = " ".join(part.text for part in run)
            texts.append(self._terminal(_Part(text)) if is_regular and not are_regular else text)
        return _Part(f"({' '.join(texts)})" if texts else '""', are_regular, bool(parts) and parts[-1].is_open)

    def _either(self, parts: Sequence[_Part]) -> _Part:
        regular = [part.text for part in parts if part.is_regular]
        texts = [part.text for part in parts if not part.is_regular]
        if regular and texts:
            regular = [self._terminal(_Part(" | ".join(regular)))]
        return _Part(f"({' | '.join(regular + texts)})", not texts, any(part.is_open for part in parts))

    def _pieces(self, text: str) -> list[_Part]:
        parts, left = list[_Part](), text
        for token in self._vocabulary.tokenize_str(text, parse_special=True):
            if not self._vocabulary.is_special_token(token):
                continue
            before, name, after = left.partition(self._vocabulary.decode_str([token]))
            if not name:
                _refuse(f"a text with a special token, {text!r}", "its name in the text", "Write it as text alone.")
            if token in self._vocabulary.eos_tokens:
                _refuse(f"an end-of-sequence token in {text!r}", "other tokens", "Leave it out: it ends every text.")
            parts += [_Part(json.dumps(before))] if before else []
            parts.append(_Part(f"<[{token}]>", False))
            left = after
        return [*parts, _Part(json.dumps(left))] if left else parts

    def _literals(self, text: str) -> _Part:
        return self._join(self._pieces(text))

    def _mark(self, text: str) -> _Mark:
        pieces = self._pieces(text)
        if not pieces[0].is_regular:
            return _Mark("", tuple(pieces))
        return _Mark(pieces[0].text, tuple(pieces[1:]))

    def _until(self, mark: _Mark, marks: Sequence[_Mark]) -> _Part:
        plain = " | ".join(other.text for other in marks if not other.special)
        text = f"({_ANY} {mark.text})" if mark.text else _ANY
        if plain:
            text = f"({text} & ~({_ANY} ({plain}) {_ANY if mark.special else _SOME}))"
        return self._join([_Part(text), *mark.special])

    def _without(self, marks: Sequence[_Mark]) -> _Part:
        plain = " | ".join(mark.text for mark in marks if not mark.special)
        return _Part(f"({_ANY} & ~({_ANY} ({plain}) {_ANY}))" if plain else _ANY, is_open=True)

    def _ended(self, part: _Part, end: str) -> _Part:
        return self._join([part, self._literals(end)]) if end else part

    def _rest_of_tag(self, asked: dict[str, Any], path: str, end: str, depth: int) -> _Part:
        own = _text(asked, "end", path, may_be_empty=True)
        content = self._part(asked["content"], f"{path}.content", own or end, depth)
        return self._ended(content, end) if own else content

    def _triggered_tags(self, asked: dict[str, Any], path: str, end: str, depth: int) -> _Part:
        tags, triggers = _list(asked, "tags", path), _list(asked, "triggers", path)
        needs_one, is_single = _truth(asked, "at_least_one", path), _truth(asked, "stop_after_first", path)
        last = end if is_single else ""  # what ends the free text at a tag's own end
        wholes: list[_Part] = []
        bodies: dict[str, list[_Part]] = {}
        for trigger in triggers:
            is_right = isinstance(trigger, str) and bool(trigger)
            bodies[_given(trigger, is_right, f"{path}.triggers", "texts with characters")] = []
        for at, tag in enumerate(tags):
            here = f"{path}.tags[{at}]"
            self._kind(tag, here, depth, is_tag=True)
            begin = _text(tag, "begin", here)
            found = [trigger for trigger in bodies if begin.startswith(trigger)]
            if len(found) != 1:
                got = f"{here}: begin {begin!r} after {' and '.join(map(repr, found)) or 'no trigger'}"
                _refuse(got, "one trigger at its beginning", "Correct the triggers.")
            body = self._named(self._rest_of_tag(tag, here, last, depth + 1))
            if not is_single:
                _check_limited(body, tag, here)
            wholes.append(self._join([*self._pieces(begin), body]))
            bodies[found[0]].append(self._join([*self._pieces(begin[len(found[0]) :]), body]))
        if unused := [trigger for trigger, parts in bodies.items() if not parts]:
            _refuse(f"{path}.triggers: {unused[0]!r}, which begins no tag", "triggers of tags", "Leave it out.")
        marks = {trigger: self._mark(trigger) for trigger in bodies}
        ends = [self._mark(end)] if end else []
        stops = [*marks.values(), *ends]
        parts = [self._join([self._until(marks[name], stops), self._either(bodies[name])]) for name in bodies]
        rest = self._until(ends[0], stops) if ends else self._without(stops)
        first = self._either(wholes)
        if is_single:
            return first if needs_one else self._either([*parts, rest])
        either = self._either(parts)
        tail = [_Part(f"({either.text})*", either.is_regular), rest]
        return self._join([first, *tail] if needs_one else tail)

    def _tags_with_separator(self, asked: dict[str, Any], path: str, end: str, depth: int) -> _Part:
        separator = self._pieces(_text(asked, "separator", path, may_be_empty=True))
        needs_one, is_single = _truth(asked, "at_least_one", path), _truth(asked, "stop_after_first", path)
        last, tags = end if is_single else "", []
        for at, tag in enumerate(_list(asked, "tags", path)):
            tags.append(self._part(tag, f"{path}.tags[{at}]", last, depth, is_tag=True))
            if not is_single:
                _check_limited(tags[-1], tag, f"{path}.tags[{at}]")
        one = self._either(tags)
        if not is_single:
            one = self._named(one)
            more = self._join([*separator, one])
            one = self._ended(self._join([one, _Part(f"({more.text})*", more.is_regular)]), end)
        return one if needs_one else self._either([one, self._literals(end)])

    def _limited(self, asked: Any, path: str, depth: int) -> _Part:
        part = self._part(asked, path, "", depth)
        _check_limited(part, asked, path)
        return part


def _check_limited(part: _Part, asked: dict[str, Any], path: str) -> None:
    if part.is_open:
        got = f"{path}: {asked.get('type', 'tag')}, which holds free text that nothing ends, before other text"
        _refuse(got, "free text at the end, or in a tag with an end", "Put a tag with an end around it.")


def _times(asked: dict[str, Any], path: str) -> str:
    low, high = asked["min"], asked["max"]
    are_numbers = all(isinstance(value, int) and not isinstance(value, bool) for value in (low, high))
    if not are_numbers or not 0 <= low <= (MAX_REPEAT if high == -1 else high) <= MAX_REPEAT:
        expected = f"0 <= min <= max <= {MAX_REPEAT}, or -1 as max: without a bound"
        _refuse(f"{path}: min {low!r} and max {high!r}", expected, "Correct them.")
    return f"{{{low},{'' if high == -1 else high}}}"


def _regex_literal(pattern: str) -> str:
    text, is_escaped = "", False
    for char in pattern:
        written = {"\n": "n", "\r": "r"}.get(char, char)
        text += written if is_escaped or (written == char and char != "/") else f"\\{written}"
        is_escaped = char == "\\" and not is_escaped
    if is_escaped:
        _refuse(f"a pattern that ends with a backslash, {pattern!r}", "a regular expression", "Correct the pattern.")
    return f"/{text}/"


def _text(asked: dict[str, Any], name: str, path: str, may_be_empty: bool = False) -> str:
    is_right = isinstance(asked[name], str) and bool(asked[name] or may_be_empty)
    return str(_given(asked[name], is_right, f"{path}.{name}", "a text" if may_be_empty else "a text with characters"))


def _list(asked: dict[str, Any], name: str, path: str) -> list[Any]:
    is_right = isinstance(asked[name], list) and bool(asked[name])
    return list(_given(asked[name], is_right, f"{path}.{name}", "a list that is not empty"))


def _truth(asked: dict[str, Any], name: str, path: str) -> bool:
    value = asked.get(name, False)
    return bool(_given(value, isinstance(value, bool), f"{path}.{name}", "true or false"))


def _given(value: Any, is_right: bool, path: str, expected: str) -> Any:
    if not is_right:
        _refuse(f"{path}: {value!r}", expected, "Correct the structural_tag.")
    return value
