# SPDX-License-Identifier: Apache-2.0


from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.core.sampling import (
    ACCEPT_LANE,
    DRAFT_LANE,
    DRAFT_LANE_STEP,
    TARGET_LANE,
    SamplingParams,
    race_draws,
    uniforms,
)
from speccompile.runtime.control import FixedLength
from speccompile.runtime.sequences import BLOCK, SequenceBatch, TokenSequence, UniformTable
from speccompile.runtime.slot_allocator import FairQueue
from speccompile.runtime.text import TextSink
from tests.runtime.scheduler_lab import Bench, greedy, numbers
from tests.runtime.test_text import ByteTokenizer

PARAMS = [SamplingParams(temperature=1.0, seed=2**63 + 5), SamplingParams(), SamplingParams(temperature=0.5, seed=7)]
LENGTHS = [9, 4, 700]


@pytest.fixture
def batch():
    made = SequenceBatch([], 3)
    made.sequences = [
        TokenSequence(i, list(range(n)), p, frozenset(), None)
        for i, (n, p) in enumerate(zip(LENGTHS, PARAMS, strict=True))
    ]
    made.changed()
    return made


@pytest.mark.parametrize(
    "reads",
    [
        [(40, 43), (44, 40 + BLOCK + 3), (40 + 2 * BLOCK, 41 + 2 * BLOCK)],
        [(end - 5, end) for end in range(45, 1000, 5)],
    ],
    ids=["leaps", "steps"],
)
def test_tables_hold_the_draws_of_every_position_across_blocks(reads):
    table, seeds = UniformTable(2**40 + 11, 40), np.array([2**40 + 11], dtype=np.uint64)
    for start, end in reads:
        rows, positions = table.rows(start, end), np.arange(start, end)[None]
        np.testing.assert_array_equal(rows[0], uniforms(seeds, positions, TARGET_LANE)[0])
        np.testing.assert_array_equal(rows[1:].T, race_draws(seeds, positions)[0])
        for lane in (DRAFT_LANE + 3, DRAFT_LANE + 12, ACCEPT_LANE + 3, DRAFT_LANE + 2 * DRAFT_LANE_STEP + 1):
            np.testing.assert_array_equal(table.lane(lane, start, end), uniforms(seeds, positions, lane)[0])


def test_drafts_have_draws_of_their_own(batch):
    got = batch.draft_uniforms(2, 4)
    assert len(set(got[0].tolist() + batch.draft_uniforms(3, 4)[0].tolist())) == 8
    np.testing.assert_array_equal(batch.draft_uniforms(2), got[:, :1])


def test_only_sampling_parameters_that_change_something_are_fed(batch):
    assert batch.warp_feeds().keys() == {"temperature"}
    assert not batch.is_greedy
    batch.sequences = [batch.sequences[1]]
    batch.changed()
    assert batch.is_greedy and batch.warp_feeds() == {}
    batch.sequences = [TokenSequence(0, [1], SamplingParams(temperature=0.5, top_k=3, top_p=0.9), frozenset(), None)]
    batch.changed()
    assert {name: value.tolist() for name, value in batch.warp_feeds().items()} == {
        "temperature": [0.5],
        "top_k": [3],
        "top_p": [pytest.approx(0.9)],
    }


@pytest.mark.parametrize("kind", ["chain", "tree", "heads"])
def test_a_prompt_whose_logprobs_are_asked_for_is_read_whole_and_its_text_is_the_same(kind):
    bench = Bench(kind=kind, max_seq=120, planner=FixedLength(None))
    prompt = numbers(70)
    bench.ask(prompt)  # its rows are kept
    for _ in range(2):
        params = SamplingParams(max_new_tokens=12, prompt_logprobs=1)
        handle = bench.submit(prompt, sampling=params, speculation="on")
        bench.submit(numbers(30, 1), sampling=params)
        bench.finish()
        bench.check()
        assert bench.tokens(handle) == greedy(prompt, 12)
        first, *rest = bench.step_outputs[handle.number][0]
        assert [entry and entry.token for entry in first.prompt_logprobs] == [None, *prompt[1:]]
        assert first.num_draft_tokens or kind == "heads"
        assert not any(step_output.prompt_logprobs for step_output in rest)
        assert rest[-1].stats["num_reused_tokens"] == 0


@pytest.mark.parametrize("slots", [1, 3])
def test_a_small_request_waits_for_one_output_of_a_large_one(slots):
    """Requests take turns at the slots, and one that comes is served before the second turn of those before it."""
    bench = Bench(slots=slots, planner=FixedLength(0))
    large = bench.submit([1, 2, 3], sampling=SamplingParams(max_new_tokens=20), num_outputs=24)
    for _ in range(5):
        bench.step()
    small = [bench.submit([4 + i, 5, 6], sampling=SamplingParams(max_new_tokens=4)) for i in range(4)]
    for _ in range(16 + 4 * -(-4 // slots)):
        bench.step()
        bench.check()
    assert all(bench.tokens(one) == greedy([4 + i, 5, 6], 4) for i, one in enumerate(small[:slots]))
    assert len(large.open) >= 24 - 2 * slots
    bench.finish()
    assert all(bench.tokens(large, i) == greedy([1, 2, 3], 20) for i in range(24))


def test_requests_take_turns_and_none_waits_for_good():
    queue = FairQueue()
    handles = [SimpleNamespace(number=i, open=[]) for i in range(4)]
    for handle, num in zip(handles, (4, 2, 1, 3), strict=True):
        handle.open = [SimpleNamespace(handle=handle, name=f"{'abcd'[handle.number]}{i}") for i in range(num)]

    def names():
        wanted, num = [output.name for output in queue], len(queue)
        assert len(wanted) == num and bool(queue) == bool(num)
        return wanted

    queue.add(handles[0])
    first = queue.take()
    queue.add(handles[1])  # it comes before the second turn of the first
    assert first.name == "a0" and names() == ["b0", "a1", "b1", "a2", "a3"]
    assert queue.take().name == "b0"
    queue.add(handles[2])
    queue.add(handles[3])
    assert names() == ["a1", "c0", "d0", "b1", "a2", "d1", "a3", "d2"]
    queue.put_back(first)
    queue.discard(handles[2].open[0])
    queue.discard(handles[2].open[0])
    assert names() == ["a0", "a1", "d0", "b1", "a2", "d1", "a3", "d2"]
    queue.discard(handles[0].open[2])
    assert [queue.take().name for _ in range(7)] == ["a0", "a1", "d0", "b1", "a3", "d1", "d2"] and names() == []


def test_a_stop_string_in_the_text_that_was_held_back_is_named():
    """A byte that no character begins with waits for the next one all the same."""

    class NamedBytes(ByteTokenizer):
        def id_to_token(self, token):
            return f"<0x{token:02X}>"

    sequence = TokenSequence(0, [1], SamplingParams(max_new_tokens=2), frozenset(), TextSink(NamedBytes(), ["\ufffd"]))
    sequence.room = 9
    step = sequence.emit([65, 0xFF], 1, 1, True)
    assert (step.tokens, step.text, step.finish_reason, step.stop_string) == ([65, 0xFF], "A", "stop", "\ufffd")
