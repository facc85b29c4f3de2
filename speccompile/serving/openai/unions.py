# SPDX-License-Identifier: Apache-2.0
"""Unions in bodies, chosen by what is given: an error is then that of one alternative, and names its field."""

from __future__ import annotations

from typing import Any

from pydantic import Discriminator, Tag

MARK = ":"  # begins the names of alternatives, which `errors` leaves out of a field's path


def tag(name: str) -> Tag:
    """Returns the mark of an alternative: the value of `type` that chooses it, or `text` or `list`."""
    return Tag(MARK + name)


def by_type(*names: str, default: str = "", key: str = "type") -> Discriminator:
    """Returns what chooses among objects by their `type`."""

    def choose(value: Any) -> str | None:
        found = value.get(key, default) if isinstance(value, dict) else getattr(value, key, None)
        return f"{MARK}{found}" if isinstance(found, str) else None

    return _discriminator(choose, f"expected an object whose `{key}` is {' or '.join(names)}")


def text_or_list() -> Discriminator:
    """Returns what chooses between `tag("text")` and `tag("list")`."""

    def choose(value: Any) -> str | None:
        return MARK + ("text" if isinstance(value, str) else "list") if isinstance(value, str | list) else None

    return _discriminator(choose, "expected a text or a list")


def _discriminator(choose: Any, message: str) -> Discriminator:
    return Discriminator(choose, custom_error_type="invalid_value", custom_error_message=message)
