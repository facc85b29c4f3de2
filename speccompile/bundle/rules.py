# SPDX-License-Identifier: Apache-2.0
"""Rules for the values of a JSON document: types and bounds, by key; and dataclasses that declare them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from speccompile.common.json_reader import finite_number, shown, whole_number
from speccompile.errors import BundleError

REBUILD = "Build the bundle again, or copy it again from where it was built."
MAX_COUNT = 2**31 - 1
_MAX_NAME_BYTES = 255
Record = TypeVar("Record")


@dataclass(frozen=True)
class Rule:
    """Rule for a value.

    Args:
        keys: rules of an object's values by key; a key that begins with "?" may be missing or null.
        items: rule of each item of a list, or of each value of an object.
        is_closed: an object may have no other keys than those of `keys`.
    """

    expected: str
    accepts: Callable[[Any], bool]
    keys: Mapping[str, Rule] | None = None
    items: Rule | None = None
    is_closed: bool = False


def is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def is_path(value: Any) -> bool:
    return is_text(value) and all(len(part.encode()) <= _MAX_NAME_BYTES for part in value.split("/"))


def whole(least: int, most: int = MAX_COUNT) -> Rule:
    """Returns the rule for whole numbers between two bounds, these included."""
    return Rule(f"a whole number from {least} to {most}", lambda v: whole_number(v, least, most) is not None)


def an_object(**keys: Rule) -> Rule:
    """Returns the rule for objects with these keys; `may_NAME` is a key that may be missing or null."""
    named = {f"?{name[4:]}" if name.startswith("may_") else name: rule for name, rule in keys.items()}
    return Rule("an object", lambda v: isinstance(v, dict), named)


def closed(**keys: Rule) -> Rule:
    return replace(an_object(**keys), is_closed=True)


def one_of(*words: str) -> Rule:
    return Rule(f"one of {', '.join(words)}", lambda v: v in words if isinstance(v, str) else False)


def list_of(rule: Rule) -> Rule:
    return Rule("a list", lambda v: isinstance(v, list), items=rule)


def map_of(rule: Rule) -> Rule:
    return Rule("an object", lambda v: isinstance(v, dict) and all(map(is_text, v)), items=rule)


TEXT, PATH = Rule("a text", is_text), Rule("a relative path", is_path)
ANY_OBJECT = Rule("an object", lambda v: isinstance(v, dict))
TIME = Rule("a finite number from 0 on", lambda v: (number := finite_number(v)) is not None and number >= 0)
NUMBER = Rule("a finite number", lambda v: finite_number(v) is not None)
POSITIVE = Rule("a number above 0", lambda v: (number := finite_number(v)) is not None and number > 0)
DIM = Rule("a size, or a dim by name", lambda v: is_text(v) or whole_number(v, 0, MAX_COUNT) is not None)
THREADS = Rule("'auto', or threads from 1 to 1024", lambda v: v == "auto" or whole_number(v, 1, 1024) is not None)
FLAG = Rule("true or false", lambda v: isinstance(v, bool))


def check_value(where: str, path: str, value: Any, rule: Rule) -> None:
    """Refuses a value that does not fit a rule.

    Raises:
        BundleError: the first part that does not fit, with its key.
    """
    if not rule.accepts(value):
        raise BundleError(f"{where} ({shown_path(path)})", shown(value), rule.expected, REBUILD)
    if rule.is_closed and (unknown := sorted({*value} - {key.removeprefix("?") for key in rule.keys or {}})):
        known = ", ".join(sorted(key.removeprefix("?") for key in rule.keys or {}))
        got = f"an unknown key {shown(unknown[0])}"
        raise BundleError(f"{where} ({shown_path(path)})", got, f"the keys {known}", REBUILD)
    for key, inner in (rule.keys or {}).items():
        name = key.removeprefix("?")
        if key.startswith("?") and value.get(name) is None:
            continue
        check_value(where, f"{path}.{name}".lstrip("."), value.get(name), inner)
    if rule.items is not None:
        rows = value.items() if isinstance(value, dict) else enumerate(value)
        for part, item in rows:
            check_value(where, f"{path}.{part}".lstrip("."), item, rule.items)


def shown_path(path: str) -> str:
    return path if path.isprintable() and len(path) <= 200 else shown(path)


def recorded(rule: Rule, **default: Any) -> Any:
    """Returns a dataclass field of a record.

    Args:
        default: `default` or `default_factory`, as of `dataclasses.field`: the key may be missing or null.
    """
    return field(metadata={"rule": rule}, **default)


def rule_from_record(record: type[Any]) -> Rule:
    keys = {f"{'?' if _has_default(f) else ''}{f.name}": f.metadata["rule"] for f in dataclasses.fields(record)}
    return Rule("an object", lambda value: isinstance(value, dict), keys)


def record_from_json(record: type[Record], data: Mapping[str, Any]) -> Record:
    """Returns the record made from an object that fits its rule; unknown keys are ignored."""
    hints = typing.get_type_hints(record)
    given = {name: data[name] for name in hints if data.get(name) is not None}
    made = {k: record_from_json(hints[k], v) if dataclasses.is_dataclass(hints[k]) else v for k, v in given.items()}
    return record(**made)


def _has_default(of: dataclasses.Field[Any]) -> bool:
    return of.default is not dataclasses.MISSING or of.default_factory is not dataclasses.MISSING
