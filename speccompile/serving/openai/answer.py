# SPDX-License-Identifier: Apache-2.0
"""The outputs of one HTTP request, from the scheduler's thread into the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from speccompile.errors import RuntimeFault
from speccompile.runtime.requests import Piece, Request
from speccompile.runtime.service import Service
from speccompile.runtime.tickets import Ticket

Result = TypeVar("Result")


class Answer:
    """Submits requests, gives their pieces as they come, and cancels what is not read to its end.

    Choices are numbered as OpenAI numbers them: the outputs of the first request, then those of the second.

    Args:
        service: takes the requests.
        requests: each with the same number of outputs.
    """

    def __init__(self, service: Service, requests: Sequence[Request]) -> None:
        self._service, self._requests = service, requests
        self._queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self.num_choices = sum(request.num_outputs for request in requests)
        self._num_left = self.num_choices

    def submit(self) -> None:
        """Submit all requests.

        Raises:
            RuntimeFault: one was not taken; then none of them is.
        """
        loop = asyncio.get_running_loop()
        first = 0
        try:
            for request in self._requests:
                self._tickets.append(self._service.submit(request, self._receiver(loop, first)))
                first += request.num_outputs
        except RuntimeFault:
            self.close()
            raise

    def _receiver(self, loop: asyncio.AbstractEventLoop, first: int) -> Callable[[Piece], None]:
        def receive(piece: Piece) -> None:  # on the scheduler's thread
            with suppress(RuntimeError):  # the loop was closed under the request: nobody waits for the piece
                loop.call_soon_threadsafe(self._queue.put_nowait, (first + piece.output_index, piece))

        return receive

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(index of the choice, piece) until every choice has ended."""
        while self._num_left:
            index, piece = await self._queue.get()
            if piece.finish_reason is not None:
                self._num_left -= 1
            yield index, piece

    def close(self) -> None:
        """Cancel what has not ended."""
        if self._num_left:
            for ticket in self._tickets:
                self._service.cancel(ticket)


async def unless_disconnected(http: HttpRequest, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of some work; None when the client hangs up before it is there: then the work is cancelled.

    Args:
        http: its body has been read.
        work: what to do.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnection(http.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def disconnection(receive: Callable[[], Coroutine[Any, Any, Any]] | Any) -> None:
    """Returns when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
