# SPDX-License-Identifier: Apache-2.0
"""How a field of a frozen dataclass is declared: its meaning and range. Sections of the recipe derive from it.

Sampling parameters declare more: see `common.surfaces`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

METADATA_KEY = "parameter"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What is declared of a field besides its name, type and default.

    Args:
        description: its meaning, as the recipe's schema shows it.
        lt: bound that values must stay below; infinity: any finite value.
        check: returns the value as it is stored; raises ValueError with what was expected.
        beside_section: of a backend: a key of the recipe's `engine` section itself.
    """

    description: str = ""
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


def parameter(default: Any, **declared: Any) -> Any:
    """Returns a dataclass field with this default and a `Parameter` of the other arguments."""
    return dataclasses.field(default=default, metadata={METADATA_KEY: Parameter(**declared)})


def parameters(owner: type) -> dict[str, Parameter]:
    return {field.name: field.metadata[METADATA_KEY] for field in dataclasses.fields(owner)}
