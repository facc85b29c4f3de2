# SPDX-License-Identifier: Apache-2.0
"""How many tokens a value of a JSON schema needs at least, estimated from above."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

_FORMAT = 40  # characters of a text with a `format`
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class SchemaSizes:
    """Sizes of the values of a schema's parts."""

    def __init__(self, whole: Any, count: Callable[[str], int]) -> None:
        self._count = count
        self._known: dict[int, float] = {}
        self._seen: set[int] = set()
        self.choices: dict[tuple[int, str], float] = {}  # parts that a value may lack, and the longest alternatives
        before: dict[int, float] | None = None
        while before != self._known:  # a part may lead to itself
            before, self._seen = dict(self._known), set()
            self.least = self._size(whole, whole)  # tokens of the smallest value; infinity: there is none that ends

    def _size(self, schema: Any, root: Any) -> float:
        """Returns the tokens of the smallest value of a part whose references begin at `root`."""
        if not isinstance(schema, dict):
            return math.inf if schema is False else 1
        if id(schema) in self._seen:
            return self._known.get(id(schema), math.inf)
        self._seen.add(id(schema))
        root = schema if "$id" in schema else root
        size = self._own(schema, root)
        if "$ref" in schema:
            size = max(size, self._size(_resolve(schema["$ref"], root), root))
        for part in _list(schema, "allOf"):
            size += self._size(part, root)
        for name in ("anyOf", "oneOf"):
            if parts := _list(schema, name):
                size += self._chosen(schema, name, [self._size(part, root) for part in parts])
        self._known[id(schema)] = size
        return size

    def _chosen(self, schema: Mapping[str, Any], name: str, sizes: list[float]) -> float:
        self._note(schema, name, sizes if len(sizes) > 1 else [])  # a text may go on with the largest
        return min(sizes, default=math.inf)

    def _note(self, schema: Mapping[str, Any], name: str, sizes: list[float]) -> None:
        self.choices[id(schema), name] = max(filter(math.isfinite, sizes), default=0.0)

    def _own(self, schema: Mapping[str, Any], root: Any) -> float:
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else _list(schema, "enum")
            return self._chosen(schema, "enum", [self._count(_written(value)) for value in values])
        asked = schema.get("type", [])
        kinds = [asked] if isinstance(asked, str) else asked if isinstance(asked, list) else []
        sizes: Mapping[str, Callable[[Mapping[str, Any], Any], float]] = {
            "object": self._object,
            "array": self._array,
            "string": self._text,
            "number": self._digits,
            "integer": self._digits,
            "boolean": lambda *given: 1,
            "null": lambda *given: 1,
        }
        return self._chosen(schema, "type", [sizes[kind](schema, root) for kind in kinds or sizes if kind in sizes])

    def _array(self, schema: Mapping[str, Any], root: Any) -> float:
        first, least = _list(schema, "prefixItems"), _number(schema, "minItems")
        sizes = [self._size(part, root) + 1 for part in first]
        item = self._size(schema.get("items", True), root) + 1
        rest = max(least - len(first), 0)
        self._note(schema, "items", [item, *sizes[least:]])
        return 2 + sum(sizes[:least]) + (rest * item if rest else 0)

    def _object(self, schema: Mapping[str, Any], root: Any) -> float:
        parts = schema.get("properties")
        parts, size = parts if isinstance(parts, dict) else {}, 2.0
        required = set(map(str, _list(schema, "required")))
        for name, part in parts.items():
            own = self._count(_written(name)) + 3 + self._size(part, root)
            size += own if name in required else 0
            self._note(schema, f"property {name}", [0 if name in required else own])
        others = [schema.get("additionalProperties"), *dict(schema.get("patternProperties") or {}).values()]
        sizes = [self._size(part, root) for part in others if isinstance(part, dict)]
        self._note(schema, "more", [size + 6 for size in sizes])
        more = max(sizes, default=1)
        extra = len(required - parts.keys()) + _number(schema, "minProperties")
        return size + (extra * (more + 6) if extra else 0)

    def _text(self, schema: Mapping[str, Any], root: Any) -> float:
        least = _number(schema, "minLength") + (_FORMAT if "format" in schema else 0)
        if isinstance(pattern := schema.get("pattern"), str):
            least += len(pattern) + sum(map(int, re.findall(r"\d{1,6}", pattern)))
        self._note(schema, "text", [2 + least] if least else [])
        return 2 + least

    def _digits(self, schema: Mapping[str, Any], root: Any) -> float:
        size = 1.0 + max([len(str(schema[name])) + 2 for name in _BOUNDS if name in schema], default=0)
        self._note(schema, "digits", [size])
        return size


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _number(schema: Mapping[str, Any], name: str) -> int:
    found = schema.get(name, 0)
    return int(found) if isinstance(found, int | float) and 0 <= found < 1e6 else 0


def _resolve(reference: Any, root: Any) -> Any:
    if not isinstance(reference, str) or not re.fullmatch(r"#(/.*)?", reference):
        return {}
    found = root
    for step in reference[2:].split("/") if len(reference) > 1 else []:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else _item(found, key)
    return {} if found is None else found


def _item(found: Any, key: str) -> Any:
    return found[int(key)] if isinstance(found, list) and key.isdigit() and int(key) < len(found) else None


def growth_of_grammar(grammar: str, count: Callable[[str], int]) -> float | None:
    """Returns the tokens by which one token may lengthen the shortest ending of a text, with room for two parts.

    None: the grammar holds no JSON; infinity: no text of it ends.
    """
    sizes = [SchemaSizes(schema, count) for schema in schemas_in(grammar)]
    if any(math.isinf(size.least) for size in sizes):
        return math.inf
    choices = [choice for size in sizes for choice in size.choices.values()]
    if not grammar.startswith("{") or '"lark_grammar"' in grammar:  # a schema's texts may come again, or be left out
        choices += [size.least for size in sizes]
    return sum(map(int, sorted(choices)[-2:])) + 12 if sizes else None


def schemas_in(grammar: str) -> list[Any]:
    """Returns the JSON schemas of a grammar in the language of llguidance."""
    found: list[Any] = []

    def note(schema: Any) -> Any:
        found.append(schema)
        return schema

    with_schemas(grammar, note)
    return found


def with_schemas(grammar: str, change: Callable[[Any], Any]) -> str:
    """Returns a grammar in the language of llguidance, its JSON schemas replaced by what `change` makes of them."""
    whole = json.loads(grammar) if grammar.startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
    for part in whole["grammars"]:
        if part.get("json_schema") is not None:
            part["json_schema"] = change(part["json_schema"])
        text, made, end = part.get("lark_grammar") or "", "", 0
        for start in [match.end() for match in re.finditer(r"%json\s*(?=\{)", text)]:
            if start >= end:  # not inside of one
                schema, after = json.JSONDecoder().raw_decode(text, start)
                made, end = made + text[end:start] + json.dumps(change(schema)), after
        if text:
            part["lark_grammar"] = made + text[end:]
    return json.dumps(whole)
