# SPDX-License-Identifier: Apache-2.0
"""Ranges of the fields of a dataclass, and the messages about values outside."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from speccompile.common.parameters import check_parameters, parameter
from speccompile.errors import RecipeError


@dataclass(frozen=True)
class Fields:
    free: int = 0
    count: int | str = parameter("auto", ge=1, le=64, words=("auto",))
    share: float = parameter(0.5, gt=0, le=1)
    floor: float = parameter(0.0, ge=0, lt=1)
    size: int | None = parameter(None, ge=2)
    kind: str = parameter("a", words=("a", "b", "c"))
    most: int = parameter(9, ge=1, le=32)

    def __post_init__(self) -> None:
        check_parameters(self, "speculator", most=(self.size or 1, 32))


@pytest.mark.parametrize("values", [{}, {"free": -7}, {"count": 64}, {"share": 1}, {"size": 2}, {"kind": "c"}])
def test_values_in_range_pass(values: dict[str, Any]) -> None:
    Fields(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "speculator.count: got 0; expected auto, or 1 to 64"),
        ({"count": "many"}, "speculator.count: got 'many'; expected auto, or 1 to 64"),
        ({"share": 0.0}, "speculator.share: got 0.0; expected above 0, at most 1"),
        ({"share": math.nan}, "speculator.share: got nan; expected above 0, at most 1"),
        ({"floor": 1.0}, "speculator.floor: got 1.0; expected 0 to below 1"),
        ({"size": 1}, "speculator.size: got 1; expected 2 or more"),
        ({"kind": "d"}, "speculator.kind: got 'd'; expected a, b or c"),
        ({"size": 12}, "speculator.most: got 9; expected 12 to 32"),
    ],
)
def test_values_out_of_range_are_refused_with_the_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Fields(**values)
    assert message in str(caught.value) and "Correct the recipe." in str(caught.value)
