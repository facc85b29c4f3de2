# SPDX-License-Identifier: Apache-2.0
"""The only bridge from the scheduler's thread into an event loop: step outputs as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from speccompile.runtime.generation import Generation, generation_of_steps
from speccompile.runtime.handles import RequestHandle
from speccompile.runtime.requests import Request, StepOutput


class Submits(Protocol):
    """The part of `Service` that a stream needs."""

    def submit(self, request: Request, on_output: Callable[[StepOutput], None], *more: Request) -> RequestHandle: ...

    def cancel(self, handle: RequestHandle) -> None: ...


class OutputStream:
    """Submits requests and iterates over (number of the output, step output) until every output has ended.

    Outputs are numbered over all requests: those of the first, then those of the second. Leaving `async with`, or
    calling `close`, cancels what has not ended. A slow reader delays nothing: step outputs are kept until they are
    read.

    Args:
        requests: at least one; each may have several outputs.

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
