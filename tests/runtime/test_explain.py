# SPDX-License-Identifier: Apache-2.0
"""What `generate --explain` says of each step, over numpy engines."""

import pytest

from speccompile.core.sampling_params import SamplingParams
from speccompile.runtime.control import controller_of
from speccompile.runtime.explain import ExplainedPlanner, explain_step
from speccompile.runtime.requests import StepOutput, StepTrace
from tests.golden.method_fakes import make_engine


def explained(method, **sampling):
    """Returns (step, reason) of each step of a stream with a controller."""
    engine = make_engine(method)
    engine.controller = planner = ExplainedPlanner(controller_of(engine.proposer), engine.proposer)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, **sampling)
    return [(step, planner.reason(step)) for step in engine.stream("abc", params, wants_trace=True)]


def test_reasons_follow_the_controller_from_plain_steps_to_drafts():
    steps = explained("eagle3")[1:]  # the first token comes with the prompt
    is_drafted = [bool(step.num_draft_tokens) for step, _ in steps]
    first = is_drafted.index(True)
    assert first > 1 and {reason for _, reason in steps[:first]} == {"plain steps are measured before drafts"}
    assert steps[first][1] == "drafts on: not yet compared with plain decoding"
    assert all(reason.startswith(("drafts", "a plain", "plain steps", "a step")) for _, reason in steps)


def test_drawn_drafts_are_not_the_controllers():
    reasons = {reason for _, reason in explained("draft_model-auto", temperature=0.8)}
    assert reasons == {"drafts are drawn: recorded costs decide, not the clock"}


def test_an_explained_text_is_the_same():
    engine = make_engine("eagle3")
    [generation] = engine.generate(["abc"], SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert [token for step, _ in explained("eagle3") for token in step.tokens] == generation.tokens


TRACE = StepTrace([1, 2, 3, 4], [-1, 0, 0, 1], [0, 1], 9, ["a", " b", "c", "d"])


@pytest.mark.parametrize(
    ("number", "step", "text"),
    [
        (1, StepOutput(0, "x", [9], trace=TRACE), "step 1: ' x'; with the prompt"),
        (2, StepOutput(0, "x", [9], trace=TRACE), "step 2: ' x'; drafts off"),
        (
            3,
            StepOutput(0, "x", [2, 9], num_draft_tokens=3, num_accepted=1, trace=TRACE),
            "step 3: 3 draft tokens, 1 accepted; drafts off\n"
            "  'a'*\n  ├─ ' b'* > 'd'\n  └─ 'c'\n  then ' x' (recovered)",
        ),
    ],
)
def test_a_step_is_a_line_and_its_tree(number, step, text):
    assert explain_step(number, step, "drafts off", "' x'") == text
