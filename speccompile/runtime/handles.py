# SPDX-License-Identifier: Apache-2.0
"""Requests that were accepted, the queue in which their sequences wait for a slot, and the stream of their outputs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from typing import Protocol

from speccompile.runtime.requests import Generation, Request, StepOutput, generation_of_steps
from speccompile.runtime.sequences import TokenSequence


class RequestHandle:
    """Requests that were submitted as one; used to cancel them.

    Args:
        requests: as submitted; their outputs are numbered one after another.
        timeout_s: seconds from submission to the last token; None: no limit.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        number: int,
        submitted_s: float,
        timeout_s: float | None = None,
        on_output: Callable[[StepOutput], None] = lambda step_output: None,
    ) -> None:
        self.requests, self.number, self.submitted_s, self.on_output = tuple(requests), number, submitted_s, on_output
        self.deadline_s = None if timeout_s is None else submitted_s + timeout_s
        self.open: list[TokenSequence] = []  # that have not ended
        self.is_waiting = True  # none of them has a slot yet

    def add(self, sequence: TokenSequence) -> None:
        """Adds a sequence, before the handle is added to a scheduler."""
        sequence.handle = self
        self.open.append(sequence)


class FairQueue:
    """One output of each waiting request in turn, in the order in which the requests came.

    A request goes after the others only when the next turn comes, so that one that arrives in between is before it.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[int, deque[TokenSequence]] = OrderedDict()  # by number of the request handle
        self._front: deque[TokenSequence] = deque()  # out of turn
        self._last = -1  # whose turn was last: it is the first of `_turns` where it has outputs left

    def __len__(self) -> int:
        return len(self._front) + sum(map(len, self._turns.values()))

    def __bool__(self) -> bool:
        return bool(self._front or self._turns)

    def __iter__(self) -> Iterator[TokenSequence]:
        turns = list(self._turns.values())
        start = int(self._last in self._turns)
        rounds = zip_longest(*turns[start:], *turns[:start])
        return chain(self._front, (sequence for turn in rounds for sequence in turn if sequence is not None))

    def add(self, handle: RequestHandle) -> None:
        self._turns[handle.number] = deque(handle.open)

    def put_back(self, sequence: TokenSequence) -> None:
        self._front.appendleft(sequence)

    def take(self) -> TokenSequence:
        """Removes and returns the first output."""
        if self._front:
            return self._front.popleft()
        if self._last in self._turns:
            self._turns.move_to_end(self._last)
        self._last = next(iter(self._turns))
        sequence = self._turns[self._last].popleft()
        self._drop_if_empty(self._last)
        return sequence

    def discard(self, sequence: TokenSequence) -> None:
        """Removes an output, if it is there."""
        number = sequence.handle.number
        for waiting in (self._front, self._turns.get(number)):
            if waiting and sequence in waiting:
                waiting.remove(sequence)
        self._drop_if_empty(number)

    def _drop_if_empty(self, number: int) -> None:
        if not self._turns.get(number, True):
            del self._turns[number]


class Submits(Protocol):
    """The part of `Service` that a stream needs."""

    def submit(self, request: Request, on_output: Callable[[StepOutput], None], *more: Request) -> RequestHandle: ...

    def cancel(self, handle: RequestHandle) -> None: ...


class OutputStream:
    """Submits requests and iterates over (number of the output, step output) until every output has ended.

    Outputs are numbered over all requests. Leaving `async with`, or calling `close`, cancels what has not ended. A slow
    reader delays nothing: step outputs are kept until they are read.

    Raises:
        RuntimeFault, Busy: one request was not accepted; then none of them is.
    """

    def __init__(self, service: Submits, requests: Sequence[Request]) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, StepOutput]] = asyncio.Queue()
        self.num_outputs = self._num_open = sum(request.num_outputs for request in requests)
        self._handle = service.submit(requests[0], self._receive, *requests[1:])

    def _receive(self, step_output: StepOutput) -> None:  # on the scheduler's thread
        with suppress(RuntimeError):  # the loop was closed: no reader is left
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (step_output.output_index, step_output))

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> tuple[int, StepOutput]:
        if not self._num_open:
            raise StopAsyncIteration
        index, step_output = await self._queue.get()
        self._num_open -= step_output.finish_reason is not None
        return index, step_output

    def close(self) -> None:
        if self._num_open:
            self._service.cancel(self._handle)

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *fault: object) -> None:
        self.close()

    async def generations(self) -> list[Generation]:
        """Returns all outputs in their order, once every one has ended."""
        step_outputs: list[list[StepOutput]] = [[] for _ in range(self.num_outputs)]
        async for index, step_output in self:
            step_outputs[index].append(step_output)
        return [generation_of_steps(steps) for steps in step_outputs]
