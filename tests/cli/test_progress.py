# SPDX-License-Identifier: Apache-2.0
"""What a long command shows where there is no terminal, and a stage of a build where there is one."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from speccompile.cli.output import ProgressDisplay, text_from_seconds, text_from_step

ROW = {"train": {"loss": [1.0], "agreement": [0.5], "acceptance_length": 1.5}}


@pytest.fixture
def shown():
    """Returns (display, the clock's seconds as a list of one, a function that gives the lines so far)."""
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, soft_wrap=True)
    return ProgressDisplay(console, Progress(console=console, disable=True), lambda: now[0]), now, (
        lambda: out.getvalue().splitlines()
    )  # fmt: skip


def test_steps_come_with_the_time_that_is_left(shown):
    display, now, lines = shown
    for step in range(1, 101):
        display.step("plain", step, 100, ROW)
        now[0] += 2.0
    first, second, third, *_ = lines()
    assert first.startswith("plain 1/100 loss 1.00") and "left" not in first
    # After 10 more steps of 2 s, 89 are left.
    assert second.startswith("plain 11/100") and second.endswith("about 3 min left")
    assert third.startswith("plain 21/100")
    assert lines()[-1].startswith("plain 100/100") and not lines()[-1].endswith("left")


def test_shares_of_a_stage_come_now_and_then_and_other_messages_once(shown):
    display, now, lines = shown
    display.stage("target: load [x]")
    for done in range(1, 101):
        display.stage(f"text: generate train {done}/100")
        now[0] += 1.0
    display.stage("write")
    told = lines()
    assert told[0] == "target: load [x]" and told[1] == "text: generate train 1/100" and told[-1] == "write"
    assert told[2] == "text: generate train 11/100, about 1 min left"
    assert len(told) == 9


def test_held_out_measures_are_always_shown_and_checkpoints_kept_in_mind(shown):
    display, _, lines = shown
    display.step("plain", 1, 9, ROW)
    display.step("plain", 2, 9, {**ROW, "held_out": ROW["train"]})
    assert lines()[-1].startswith("plain 2/9 held out: loss 1.00")
    assert display.checkpoint is None
    display.saved("plain", 2, 9)
    assert display.checkpoint == "plain 2/9"


@pytest.mark.parametrize(("seconds", "text"), [(3.4, "3 s"), (90, "2 min"), (7200, "2.0 h")])
def test_durations(seconds, text):
    assert text_from_seconds(seconds) == text


@pytest.mark.parametrize(("message", "filled"), [("s: p 0/4", 0), ("s: p 1/4", 6), ("s: p 4/4", 24), ("s: p 5/4", 24)])
def test_a_share_is_a_bar(message, filled):
    text = text_from_step(message)
    assert text.plain == f"s: p {'━' * 24} {message.split()[-1]}"
    assert [span.end - span.start for span in text.spans if str(span.style) == "green"] == ([filled] if filled else [])


@pytest.mark.parametrize("message", ["export target", "compile target: merge_linears", "a: b/c", "x: 1/0", "done 3"])
def test_any_other_message_stays_as_it_is(message):
    assert text_from_step(message).plain == message
