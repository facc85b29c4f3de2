# SPDX-License-Identifier: Apache-2.0
"""How a field of a frozen dataclass is declared: its meaning and range. Sections of the recipe derive from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
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


def parameters(owner: type) -> dict[str, Parameter]:
    return {field.name: field.metadata[METADATA_KEY] for field in dataclasses.fields(owner)}
