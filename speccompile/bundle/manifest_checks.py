# SPDX-License-Identifier: Apache-2.0
"""Refuses manifests whose values have wrong types, and sections that do not fit a dataclass's fields."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from pydantic import ValidationError

from speccompile.bundle.format import REBUILD
from speccompile.bundle.manifest_records import Manifest, closed_keys
from speccompile.common.json_reader import expected_of_fault, finite_number, shown, whole_number
from speccompile.errors import BundleError

_MAX_COUNT = 2**31 - 1
# What is expected in JSON's words, by pydantic's type of error.
_WORDS = {
    **dict.fromkeys(("model_type", "dict_type"), "an object"),
    "list_type": "a list",
    "string_type": "a text",
    "bool_type": "true or false",
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
}


def check_types(where: str, manifest: Mapping[str, Any]) -> None:
    """Refuses a manifest in which a value that is read has a wrong type or is out of range.

    Raises:
        BundleError: the first such value, with its key.
    """
    try:
        Manifest.model_validate(manifest)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        parts = [part for part in fault["loc"] if part != "[key]"]
        got, expected = shown(fault["input"]), _WORDS.get(fault["type"]) or expected_of_fault(fault)
        if fault["type"] == "missing":
            got, expected = "no value", f"the key {parts[-1]}"
        if fault["type"] == "extra_forbidden":
            *parts, unknown = parts
            got, expected = f"an unknown key {shown(unknown)}", f"the keys {', '.join(closed_keys(parts))}"
        path = ".".join(map(str, parts))
        path = path if path.isprintable() and len(path) <= 200 else shown(path)
        raise BundleError(f"{where} ({path})", got, expected, REBUILD) from error


def check_fields(where: str, config: type[Any], values: Mapping[str, Any], todo: str = REBUILD) -> None:
    """Refuses values whose types are not those of a dataclass's fields.

    Args:
        values: by field, as JSON has them: a list stands for a tuple.

    Raises:
        BundleError: the first such value.
    """
    hints = typing.get_type_hints(config)
    for name, value in values.items():
        if name in hints and not _fits(value, hints[name]):
            expected = str(hints[name]).removeprefix("<class '").removesuffix("'>").replace("typing.", "")
            raise BundleError(f"{where}.{name}", shown(value), expected, todo)


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a JSON value has the type of a field's hint; other types are left to the class to check."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Literal:
        return any(value == argument and type(value) is type(argument) for argument in arguments)
    if origin is typing.Annotated:
        return _fits(value, arguments[0])
    if origin is tuple:
        inner = arguments[0] if arguments else Any
        return isinstance(value, list | tuple) and all(_fits(item, inner) for item in value)
    if hint is float:
        return finite_number(value) is not None
    if hint is int:
        return whole_number(value, -_MAX_COUNT, 2**64) is not None
    return isinstance(value, hint) if hint in (str, bool, type(None)) else True
