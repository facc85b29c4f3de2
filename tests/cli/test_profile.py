# SPDX-License-Identifier: Apache-2.0
"""profile: the parts of a step are those of the steps alone, whatever the prompt took."""

import pytest

from speccompile.cli.profile import _profile, _shares
from tests.golden.method_fakes import make_engine


@pytest.mark.parametrize("num", [1, 2, 12])
def test_engines_and_the_rest_are_the_whole_of_the_steps(num):
    found = _profile(make_engine("draft_model"), "abcd" * 12, num, True, None)
    assert found["num_tokens"] == num
    assert sum(found["engines_ms"].values()) + found["outside_engine_ms"] == pytest.approx(found["step_ms"])


def test_what_the_prompt_took_is_no_engines_share():
    whole, of_prompt = {"target": 0.09, "draft": 0.02}, {"target": 0.07, "draft": 0.0}
    assert _shares(8.0, whole, of_prompt) == pytest.approx({"target": 4.0, "draft": 4.0})
    assert _shares(1.1, whole, whole) == pytest.approx({"target": 0.9, "draft": 0.2})
    assert _shares(0.0, {"target": 0.0}, {"target": 0.0}) == {"target": 0.0}
