# SPDX-License-Identifier: Apache-2.0
"""Reads fields of bodies whose API has no schema here: what has another type than expected is a 400 by its field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speccompile.serving.openai.errors import ApiError


def unsupported(field: str, got: str, expected: str) -> ApiError:
    """Returns the answer to a field that asks for something that is not supported."""
    message = f"`{field}`: got {got}; expected {expected}. This is the smallest part of the API."
    return ApiError(400, message, param=field, code="unsupported_field")


def read_object(value: Any, field: str) -> dict[str, Any]:
    """Returns an object.

    Raises:
        ApiError: it is none.
    """
    if not isinstance(value, dict):
        raise _invalid(field, value, "an object")
    return value


def read_objects(value: Any, field: str) -> list[dict[str, Any]]:
    """Returns a list of objects.

    Raises:
        ApiError: it is none.
    """
    if not isinstance(value, list):
        raise _invalid(field, value, "a list of objects")
    return [read_object(one, f"{field}.{at}") for at, one in enumerate(value)]


def required(given: dict[str, Any], name: str, field: str) -> Any:
    """Returns a value of an object.

    Raises:
        ApiError: it is not there.
    """
    if given.get(name) is None:
        raise ApiError(400, f"`{field}.{name}` is missing.", param=f"{field}.{name}", code="missing_field")
    return given[name]


def text_of_parts(content: Any, field: str, kinds: Sequence[str] = ("text",)) -> str:
    """Returns the text of a content: a text, or a list of parts that are texts.

    Args:
        content: null is an empty one.
        field: for errors.
        kinds: types of parts that are texts.

    Raises:
        ApiError: another type, or a part that is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = read_objects(content, field)
    for at, part in enumerate(parts):
        if part.get("type") not in kinds:
            raise unsupported(f"{field}.{at}", f"a part of type {part.get('type')}", " or ".join(kinds))
    return "".join(str(required(part, "text", f"{field}.{at}")) for at, part in enumerate(parts))


def _invalid(field: str, value: Any, expected: str) -> ApiError:
    got = {str: "a text", list: "a list", dict: "an object", type(None): "null"}.get(type(value), repr(value))
    return ApiError(400, f"`{field}`: got {got}; expected {expected}.", param=field, code="invalid_value")
