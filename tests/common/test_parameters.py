# SPDX-License-Identifier: Apache-2.0
"""A sampling parameter is declared once: its type, its range and its recipe key derive from its field."""

import dataclasses

import pytest
from pydantic import ValidationError

from speccompile.common.surfaces import INTEGER, NUMBER, sampling_parameter, sampling_parameters
from speccompile.core.sampling import SamplingParams
from speccompile.errors import RuntimeFault
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
        "logit_bias",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "logprobs_mode",
        "prompt_logprobs",
        "structured_outputs",
        "skip_special_tokens",
    }
