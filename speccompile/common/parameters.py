# SPDX-License-Identifier: Apache-2.0
"""How a field of a frozen dataclass is declared: its meaning and range. Sections of the recipe derive from it.

A field of `SamplingParams` declares its names where users meet it as well. These derive from the declarations: its
checks, the recipe's `decoding` section, the options of `speccompile generate`, the keys of prompt files, the fields of
the OpenAI server's bodies, the inputs of Triton models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

from speccompile.errors import RecipeError

METADATA_KEY = "parameter"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What is declared of a field besides its name, type and default."""

    description: str = ""  # its meaning, as the recipe's schema shows it
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None  # bound that values must stay below; infinity: any finite value
    words: tuple[str, ...] = ()  # values beside the range, of which None need not be one; without bounds the only ones
    check: Callable[[Any], Any] | None = None  # returns the stored value; raises ValueError with what was expected
    beside_section: bool = False  # of a backend: a key of the recipe's `engine` section itself

    def contains(self, value: Any) -> bool:
        """Returns whether a value of this type is in the range; NaN is in no range."""
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    @property
    def bounds(self) -> str:
        """The range as messages state it; empty: there is none."""
        if self.gt is not None:
            return f"above {self.gt}" + (f", at most {self.le}" if self.le is not None else "")
        if self.ge is None:
            return ""
        if self.lt is not None:
            return f"{self.ge} to below {self.lt}"
        return f"{self.ge} or more" if self.le is None else f"{self.ge} to {self.le}"


def declared(**more: Any) -> dict[str, Parameter]:
    """Returns the metadata of a dataclass field."""
    return {METADATA_KEY: Parameter(**more)}


def parameter(default: Any, **more: Any) -> Any:
    """Returns a dataclass field with this default and a `Parameter` of the other arguments."""
    return dataclasses.field(default=default, metadata=declared(**more))


def check_parameters(config: Any, where: str, **limits: tuple[float, float]) -> None:
    """Refuses values out of the range that their fields declare, or of `limits` (least, most); None passes."""
    for field in dataclasses.fields(config):
        rule, value = field.metadata.get(METADATA_KEY), getattr(config, field.name)
        if rule is None or value is None or value in rule.words:
            continue
        if field.name in limits:
            rule = dataclasses.replace(rule, ge=limits[field.name][0], le=limits[field.name][1])
        if not rule.bounds or isinstance(value, str) or not rule.contains(value):
            *others, last = rule.words or ("",)
            words = f"{', '.join(others)} or {last}" if others else last
            expected = ", or ".join(part for part in (words, rule.bounds) if part)
            raise RecipeError(f"{where}.{field.name}", repr(value), expected, "Correct the recipe.")


class HeadsTraining:
    """Base of a method's `TrainingConfig`, a frozen dataclass. Raises RecipeError: a value is out of range."""

    def __post_init__(self) -> None:
        check_parameters(self, "training.heads")


def parameters(owner: type) -> dict[str, Parameter]:
    return {field.name: field.metadata[METADATA_KEY] for field in dataclasses.fields(owner)}


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
