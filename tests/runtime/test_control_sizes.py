# SPDX-License-Identifier: Apache-2.0
"""What the controller knows of one batch size, and what of it holds for others."""

import json

import numpy as np
import pytest

from speccompile.runtime.comparison import LEAST_PAUSE, TURN
from speccompile.runtime.control import Controller, bucket_of
from tests.runtime.test_control import Ways, step_of, with_drafts


def test_batch_sizes_are_compared_apart() -> None:
    ways = Ways(2)
    ways.run(300, lambda _: 4.0)
    ways.batch = 1
    ways.run(300, lambda _: 1.2)
    decided = ways.controller.decisions()
    assert [decided[size]["drafts"] for size in ("1", "2")] == [True, False]
    assert decided["2"]["gain"] == pytest.approx(0.5, rel=0.25)
    assert json.loads(json.dumps(decided)) == decided
    assert ways.controller.expects_drafts(1) and not ways.controller.expects_drafts(2)
    assert Controller().expects_drafts(30)  # nothing is known


@pytest.mark.parametrize(
    ("num_steps", "cost", "begins_plain"),
    [(2 * TURN, 4.0, False), (300, 4.0, True), (300, 2.1, False), (300, 1.2, False)],
    ids=["one comparison", "clearly slower", "about as fast", "faster"],
)
def test_a_larger_batch_begins_without_drafts_where_they_are_clearly_slower(
    num_steps: int, cost: float, begins_plain: bool
) -> None:
    ways = Ways(2, seed=3)
    ways.run(num_steps, lambda _: cost)
    assert ways.controller.expects_drafts(8) is not begins_plain
    ways.batch = 8
    _, drafted = ways.run(LEAST_PAUSE, lambda _: cost)
    assert not any(drafted) if begins_plain else any(drafted[:TURN])
    _, drafted = ways.run(8000, lambda _: 1.2)
    assert np.mean(drafted[-2000:]) > 0.95  # found out later, if it pays there


def test_prompts_read_for_a_comparison_alone_make_comparisons_seldom() -> None:
    pauses = []
    for draft_s in (0.0, 20.0):
        controller, num_plain = Controller(), 0
        for _ in range(4):
            step_of(controller, with_drafts(False, True), slow=3.0)
            controller.read(100, draft_s)
            while controller.expects_drafts(2):
                step_of(controller, with_drafts(True, True), slow=3.0)
            num_plain = 0
            while not controller.expects_drafts(2):
                step_of(controller, with_drafts(False, False))
                num_plain += 1
        pauses.append(num_plain)
    assert pauses[1] > 1.5 * pauses[0]


def test_batch_sizes_are_looked_at_together_the_more_the_larger() -> None:
    tops = [bucket_of(batch) for batch in range(1, 65)]
    assert tops[:8] == list(range(1, 9))
    assert tops == sorted(tops) and len(set(tops[8:])) == 8
    assert all(batch <= top < 1.4 * batch for batch, top in enumerate(tops, 1))
