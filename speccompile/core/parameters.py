# SPDX-License-Identifier: Apache-2.0
"""How a field of a frozen dataclass is declared: type, range, meaning, and the surfaces that show it.

The recipe's `decoding` section and the sections of backends, and the checks of `SamplingParams` derive from these
declarations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any

_METADATA_KEY = "parameter"


@dataclass(frozen=True)
class Kind:
    """A type of values.

    Args:
        convert: gives the value in this type; raises TypeError, ValueError or OverflowError where it has another.
        expected: the type in words, for messages.
    """

    convert: Callable[[Any], Any]
    expected: str


@dataclass(frozen=True)
class Parameter:
    """What is declared of a field beside its name, type and default.

    Args:
        kind: type of its values; None: `SamplingParams` converts and checks it by itself.
        expected: its range in words, for messages; empty: every value of its type is right.
        description: its meaning, as the recipe's schema shows it.
        in_recipe: it is a key of the recipe's `decoding` section.
        ge: least value.
        gt: bound that values are above.
        le: greatest value.
        lt: bound that values are below; infinity: any finite value.
        check: gives the value as it is kept; raises ValueError with what is expected instead of it.
        beside_section: of a backend: a key of the recipe's `engine` section itself.
    """

    kind: Kind | None = None
    expected: str = ""
    description: str = ""
    in_recipe: bool = False
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    check: Callable[[Any], Any] | None = None
    beside_section: bool = False

    def contains(self, value: Any) -> bool:
        """Returns whether a value of this type is in the range; NaN is in no range."""
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


def parameter(default: Any, kind: Kind | None = None, expected: str = "", **rest: Any) -> Any:
    """Returns a dataclass field with this default and a `Parameter` of the other arguments."""
    return dataclasses.field(default=default, metadata={_METADATA_KEY: Parameter(kind, expected, **rest)})


def parameters(owner: type) -> dict[str, Parameter]:
    """Returns the declarations of a dataclass by the names of its fields, in their order."""
    found = {field.name: field.metadata.get(_METADATA_KEY) for field in dataclasses.fields(owner)}
    return {name: declared for name, declared in found.items() if declared is not None}


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError("a string")
    return float(value)


def _strings(values: Any) -> tuple[str, ...]:
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise TypeError("not a sequence of strings")
    return tuple(values)


def _flag(value: Any) -> bool:
    if index(value) not in (0, 1):
        raise ValueError("neither true nor false")
    return bool(value)


INTEGER = Kind(index, "an integer")
NUMBER = Kind(_number, "a number")
STRINGS = Kind(_strings, "a tuple of non-empty strings")
FLAG = Kind(_flag, "true or false")
TOKENS = Kind(lambda ids: tuple(index(token) for token in ids), "a tuple of token ids")
