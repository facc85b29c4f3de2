# SPDX-License-Identifier: Apache-2.0
"""Requests take turns at the slots; a prompt whose logprobs are asked for is read whole."""

from types import SimpleNamespace

import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.runtime.control import FixedLength
from speccompile.runtime.handles import FairQueue
from tests.runtime.scheduler_lab import Bench, greedy, numbers


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
