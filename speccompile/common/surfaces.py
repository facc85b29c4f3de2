# SPDX-License-Identifier: Apache-2.0
"""How a field of `SamplingParams` is declared: type, range, meaning, and its names where users meet it.

Checks, the recipe's `decoding` section, options, keys of prompt files, bodies and Triton's inputs derive from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

from speccompile.common.parameters import METADATA_KEY, Parameter


@dataclass(frozen=True)
class Kind:
    """A type of values."""

    convert: Callable[[Any], Any]  # returns the value in this type, or raises TypeError, ValueError or OverflowError
    expected: str


@dataclass(frozen=True)
class Flag:
    """An option of `speccompile generate`; its name is the parameter's."""

    help: str = ""  # its text in `--help`; empty: the parameter's description


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class BodyField:
    """A field of the OpenAI server's bodies."""

    name: str = ""  # empty: the parameter's
    description: str = ""  # as the server's schema shows it; empty: not shown
    ge: float | None = None  # least value that the body accepts, where the server checks it
    le: float | None = None
    convert: Callable[[Any], Any] = _same  # returns the parameter's value for the field's


@dataclass(frozen=True)
class TensorInput:
    """An input of the Triton models."""

    name: str = ""  # of the text models' input; empty: the parameter's
    dtype: str = ""  # a key of `contract.TRITON_TYPES`; empty: the one of the parameter's kind
    engine_name: str = ""  # of the input of `tensorrt_llm`; empty: the same
    second_name: str = ""  # of one more input with the same meaning, in every model; empty: there is none


@dataclass(frozen=True, kw_only=True)
class SamplingParameter(Parameter):
    """What is declared of a sampling parameter besides its name and default; it appears everywhere by default."""

    kind: Kind
    expected: str = ""  # its range in words, for messages; empty: every value of its type is valid
    holds: Callable[[Any], bool] | None = None  # whether a value is valid, where bounds are not enough; None: they are
    in_recipe: bool = True  # it is a key of the recipe's `decoding` section
    in_prompts: bool = True
    flag: Flag | None = Flag()  # its option; None: there is none
    body: BodyField | None = BodyField()  # its field; None: there is none
    tensor: TensorInput | None = TensorInput()  # its input; None: there is none

    def contains(self, value: Any) -> bool:
        return super().contains(value) and (self.holds is None or self.holds(value))


def sampling_parameter(default: Any, kind: Kind, expected: str = "", description: str = "", **more: Any) -> Any:
    """Returns a dataclass field with this default and a `SamplingParameter` of the other arguments."""
    declared = SamplingParameter(kind=kind, expected=expected, description=description, **more)
    return dataclasses.field(default=default, metadata={METADATA_KEY: declared})


def sampling_parameters(owner: type) -> dict[str, SamplingParameter]:
    return {field.name: field.metadata[METADATA_KEY] for field in dataclasses.fields(owner)}


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError("a string")
    return float(value)


def _strings(values: Any) -> tuple[str, ...]:
    strings = (values,) if isinstance(values, str) else tuple(values)
    if not all(isinstance(value, str) for value in strings):
        raise TypeError("not a sequence of strings")
    return strings


def _flag(value: Any) -> bool:
    if index(value) not in (0, 1):
        raise ValueError("neither true nor false")
    return bool(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def _pairs(given: Any) -> tuple[tuple[int, float], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    return tuple(sorted({int(token): float(bias) for token, bias in pairs}.items()))


INTEGER = Kind(index, "an integer")
COUNT = Kind(lambda num: None if num is None else index(num), "None, or an integer")
NUMBER = Kind(_number, "a number")
STRINGS = Kind(_strings, "a non-empty string, or a tuple of them")
TEXT = Kind(_text, "a text")
FLAG = Kind(_flag, "true or false")
TOKENS = Kind(lambda ids: tuple(index(token) for token in ids), "a tuple of token ids")
BIASES = Kind(_pairs, "(token id, bias) pairs, or a mapping")
