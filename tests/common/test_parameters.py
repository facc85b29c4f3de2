# SPDX-License-Identifier: Apache-2.0
"""A sampling parameter is declared once, with its type, range and recipe key; ranges of fields of any dataclass."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import ValidationError

from speccompile.common.parameters import (
    INTEGER,
    NUMBER,
    check_parameters,
    parameter,
    sampling_parameter,
    sampling_parameters,
)
from speccompile.core.sampling import SamplingParams
from speccompile.errors import RecipeError, RuntimeFault
from speccompile.recipe.models import DecodingSection, decoding_section


@dataclasses.dataclass(frozen=True)
class ToyParams(SamplingParams):
    """The sampling parameters with two more."""

    toy: float = sampling_parameter(0.5, NUMBER, "0 to below 1", "A toy.", ge=0.0, lt=1.0)
    hidden_toy: int = sampling_parameter(1, INTEGER, "above 0", gt=0, in_recipe=False)


def test_a_new_parameter_is_checked_and_is_a_recipe_key_by_its_declaration_alone():
    assert ToyParams(toy=0).toy == 0.0
    with pytest.raises(RuntimeFault, match=r"SamplingParams.toy.*1.0.*0 to below 1"):
        ToyParams(toy=1.0)
    with pytest.raises(RuntimeFault, match=r"SamplingParams.toy.*'x'.*a number"):
        ToyParams(toy="x")
    section = decoding_section(ToyParams)
    assert set(section.model_fields) - set(DecodingSection.model_fields) == {"toy"}
    assert section.model_validate({}).toy == 0.5
    with pytest.raises(ValidationError, match="less than 1"):
        section.model_validate({"toy": 1.0})
    assert section.model_fields["toy"].description == "A toy."


def edges():
    """Each bound of a recipe's parameter: (name, the bound, a step outwards, whether the bound is in the range)."""
    found = []
    for name, p in sampling_parameters(SamplingParams).items():
        step = 1 if p.kind is INTEGER else 0.25
        for bound, sign, is_in in ((p.ge, -1, True), (p.gt, -1, False), (p.le, 1, True), (p.lt, 1, False)):
            if bound is not None and p.in_recipe:
                found.append((name, bound, sign * step, is_in))
    return found


@pytest.mark.parametrize(("name", "bound", "outwards", "is_in"), edges())
def test_recipe_and_request_refuse_the_same_values(name, bound, outwards, is_in):
    for value, is_right in ((bound, is_in), (bound + outwards, False), (bound - outwards, bound != float("inf"))):
        if is_right:
            SamplingParams(**{name: value})
            DecodingSection.model_validate({name: value})
        else:
            with pytest.raises(RuntimeFault, match=name):
                SamplingParams(**{name: value})
            with pytest.raises(ValidationError, match=name):
                DecodingSection.model_validate({name: value})


def test_the_defaults_of_a_recipe_are_those_of_a_request():
    assert SamplingParams(**DecodingSection.model_validate({}).model_dump()) == SamplingParams()
    assert set(SamplingParams.__dataclass_fields__) - set(DecodingSection.model_fields) == {
        "adapter",
        "logit_bias",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "logprobs_mode",
        "prompt_logprobs",
        "structured_outputs",
        "skip_special_tokens",
    }


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
