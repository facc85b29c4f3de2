# SPDX-License-Identifier: Apache-2.0
"""The one reader of JSON from files that others wrote: bounded size and depth, and errors of four parts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from speccompile.errors import SpecCompileError

MAX_BYTES = 1 << 28  # far above any tokenizer.json or weight index
MAX_DEPTH = 64  # a config or a manifest has less than ten
_MAX_SHOWN = 120


class JsonFault(ValueError):
    """A text that is no JSON document, or one beyond the limits; the message says why."""


def parse_json(data: bytes | str, *, refuses_doubles: bool = False) -> Any:
    """Returns the value of a JSON document, NaN and Infinity included, as in transformers' `time_step_limit`.

    Raises:
        JsonFault: no JSON or Unicode, nested deeper than `MAX_DEPTH`, an integer of thousands of digits, a key twice.
    """
    too_deep = f"values nested more than {MAX_DEPTH} deep"
    try:
        value = json.loads(data, object_pairs_hook=_without_doubles if refuses_doubles else None)
    except JsonFault:
        raise
    except RecursionError as fault:
        raise JsonFault(too_deep) from fault
    except ValueError as fault:  # also a text that is no UTF-8
        raise JsonFault(f"no JSON ({fault})") from fault
    for item, depth in _walk(value):
        if depth > MAX_DEPTH and isinstance(item, dict | list):
            raise JsonFault(too_deep)
        if isinstance(item, str) and not is_unicode(item):
            raise JsonFault("text with half of a surrogate pair, which is no Unicode")
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise JsonFault(f"the key {shown(next(name for name in found if names.count(name) > 1))} written twice")
    return found


def read_json_file(path: Path, error: type[SpecCompileError], todo: str, expected: str = "a JSON object") -> Any:
    """Returns the value of a JSON file.

    Args:
        todo: what the user can do about a file that is missing or damaged.

    Raises:
        SpecCompileError: of the class `error`: not readable, larger than `MAX_BYTES`, or see `parse_json`.
    """
    try:
        if not path.is_file():
            raise error(str(path), "no such file" if not path.exists() else "no regular file", expected, todo)
        size_bytes = path.stat().st_size
        if size_bytes > MAX_BYTES:
            raise error(str(path), f"{size_bytes} bytes", f"{expected} of at most {MAX_BYTES} bytes", todo)
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as fault:
        raise error(str(path), str(fault), expected, todo) from fault


def read_json_object(
    path: Path, error: type[SpecCompileError], todo: str, expected: str = "a JSON object"
) -> dict[str, Any]:
    """Returns the object of a JSON file; see `read_json_file`."""
    value = read_json_file(path, error, todo, expected)
    if not isinstance(value, dict):
        raise error(str(path), kind_of(value), expected, todo)
    return value


def whole_number(value: Any, least: int, most: int) -> int | None:
    """Returns `value` where it is a whole number from `least` to `most`; None for all else, booleans included."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and least <= value <= most else None


def finite_number(value: Any) -> float | None:
    """Returns `value` where it is a finite number; None for all else, booleans included."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return float(value) if is_number and math.isfinite(value) else None
    except OverflowError:  # an integer beyond float64
        return None


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def expected_of_fault(fault: Mapping[str, Any]) -> str:
    """Returns what was expected, of one of the errors that pydantic lists."""
    message = str(fault["msg"]).removeprefix("Value error, ")
    return message.removeprefix("Input should be ").removeprefix("a valid ")


def kind_of(value: Any) -> str:
    """Returns what a value is in JSON's words, e.g. "a list"."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a whole number"}
    return "null" if value is None else names.get(type(value), "a number")


def _walk(value: Any) -> Iterator[tuple[Any, int]]:
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        yield item, depth
        if isinstance(item, dict):
            stack += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list):
            stack += [(part, depth + 1) for part in item]


def is_unicode(text: str) -> bool:
    """Returns whether a text has no half of a surrogate pair, which cannot be printed nor stand in a file's name."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
