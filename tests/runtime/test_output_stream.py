# SPDX-License-Identifier: Apache-2.0
"""The bridge from the scheduler's thread into an event loop, over a service in numpy."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.requests import Busy, Request
from speccompile.runtime.service import OutputStream, Service, ServiceOptions
from tests.runtime.test_spec_engine import make_engine, text

LONG = Request("abc", SamplingParams(max_new_tokens=4000))


def greedy(prompt, num, **rest):
    return Request(prompt, SamplingParams(max_new_tokens=num), **rest)


@pytest.fixture
def service():
    made = Service(make_engine(max_seq=4096), ServiceOptions(max_queue=4))
    made.start()
    yield made
    made.close()


def ends_of(service, num):
    """Returns the finish reasons, once so many outputs have ended."""
    while sum((found := service.stats()["num_finished"]).values()) < num:
        pass
    return found


def test_outputs_are_numbered_over_all_requests_and_each_ends_once(service):
    async def read():
        async with service.stream(greedy("abc", 9, num_outputs=2), greedy("dab", 5)) as stream:
            assert isinstance(stream, OutputStream) and stream.num_outputs == 3
            return [found async for found in stream]

    texts, ends = [""] * 3, []
    for index, step_output in asyncio.run(read()):
        texts[index] += step_output.text
        ends += [index] * (step_output.finish_reason is not None)
    assert texts == [text("abc", 9), text("abc", 9), text("dab", 5)] and sorted(ends) == [0, 1, 2]


def test_all_requests_are_taken_or_none(service):
    async def submit(*requests):
        return service.stream(*requests)

    with pytest.raises(RuntimeFault, match="prompt 0: got no tokens"):
        asyncio.run(submit(LONG, LONG, greedy("", 3)))
    assert service.stats()["num_requests"] == 0

    async def submit_many():
        async with AsyncExitStack() as stack:
            for _ in range(40):  # more than slots and queue hold
                await stack.enter_async_context(service.stream(LONG, LONG))

    with pytest.raises(Busy, match="queue: got 4 waiting requests"):
        asyncio.run(submit_many())
    num = service.stats()["num_requests"]
    assert 4 <= num < 40 and ends_of(service, 2 * num) == {"cancelled": 2 * num}


@pytest.mark.parametrize("leave", ["block", "fault", "task", "close"])
def test_leaving_a_stream_cancels_its_requests(service, leave):
    """By the end of the block, by an exception, because the task is cancelled, or by `close`."""

    async def read(began):
        async with service.stream(LONG, LONG) as stream:
            await anext(stream)
            if leave == "fault":
                raise KeyError("mine")
            if leave == "task":
                began.set()
                await asyncio.Event().wait()
            if leave == "close":
                stream.close()
                stream.close()
                assert {step_output.finish_reason async for _, step_output in stream} <= {None, "cancelled"}

    async def run():
        began = asyncio.Event()
        task = asyncio.ensure_future(read(began))
        if leave == "task":
            await began.wait()
            task.cancel()
        [result] = await asyncio.gather(task, return_exceptions=True)
        return type(result)

    wanted = {"fault": KeyError, "task": asyncio.CancelledError}
    assert asyncio.run(run()) is wanted.get(leave, type(None))
    assert ends_of(service, 2) == {"cancelled": 2}


def test_a_cancelled_completion_cancels_its_request(service):
    async def wait_shortly():
        task = asyncio.ensure_future(service.generate(LONG))
        while not service.stats()["num_active"]:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(wait_shortly())
    assert ends_of(service, 1) == {"cancelled": 1}


def test_a_slow_reader_delays_no_other_and_misses_nothing(service):
    async def read():
        slow = service.stream(greedy("abc", 30))
        [other] = await service.generate(greedy("dab", 60))
        assert ends_of(service, 2) == {"length": 2}
        return other.text, "".join([step_output.text async for _, step_output in slow])

    assert asyncio.run(read()) == (text("dab", 60), text("abc", 30))


def test_closing_the_event_loop_during_a_request_does_no_harm(service):
    async def leave():
        service.stream(greedy("abc", 300))

    asyncio.run(leave())
    assert ends_of(service, 1) == {"length": 1}
    [after] = asyncio.run(service.generate(greedy("dab", 5)))
    assert after.text == text("dab", 5) and service.fault is None
