# SPDX-License-Identifier: Apache-2.0
"""The one way from the scheduler's thread into an event loop: pieces of requests, as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from speccompile.errors import RuntimeFault
from speccompile.runtime.requests import Piece, Request
from speccompile.runtime.tickets import Ticket


class Submits(Protocol):
    """The part of `Service` that a stream needs."""

    def submit(self, request: Request, on_piece: Callable[[Piece], None]) -> Ticket:
        """Hand in a request."""
        ...

    def cancel(self, ticket: Ticket) -> None:
        """End a request's open outputs."""
        ...


@dataclass(frozen=True)
class Completion:
    """One whole output of a request.

    Args:
        index: of the output.
        text: of the new tokens, cut before a stop string.
        tokens: new token ids.
        finish_reason: see `Piece.finish_reason`.
        stats: see `Piece.stats`.
        error: with `error`, what happened.
    """

    index: int
    text: str
    tokens: list[int]
    finish_reason: str
    stats: dict[str, Any]
    error: str | None = None


class PieceStream:
    """Submits requests and iterates over their pieces, as (number of the output, piece), until every output has ended.

    Outputs are numbered over all requests: those of the first, then those of the second. To leave `async with`, or to
    call `close`, cancels what has not ended. Nothing waits for a slow reader: pieces are kept until they are read.

    Args:
        service: takes the requests.
        requests: at least one; each may have several outputs.

    Raises:
        RuntimeFault, Busy: one request was not taken; then none of them is.
    """

    def __init__(self, service: Submits, requests: Sequence[Request]) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self.num_outputs = self._num_open = sum(request.num_outputs for request in requests)
        first = 0
        try:
            for request in requests:
                self._tickets.append(service.submit(request, self._receiver(first)))
                first += request.num_outputs
        except RuntimeFault:
            self.close()
            raise

    def _receiver(self, first: int) -> Callable[[Piece], None]:
        def receive(piece: Piece) -> None:  # on the scheduler's thread
            with suppress(RuntimeError):  # the loop was closed under the request: nobody waits for the piece
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (first + piece.output_index, piece))

        return receive

    def __aiter__(self) -> PieceStream:
        return self

    async def __anext__(self) -> tuple[int, Piece]:
        if not self._num_open:
            raise StopAsyncIteration
        index, piece = await self._queue.get()
        self._num_open -= piece.finish_reason is not None
        return index, piece

    def close(self) -> None:
        """Cancel what has not ended. Any number of times."""
        if self._num_open:
            for ticket in self._tickets:
                self._service.cancel(ticket)

    async def __aenter__(self) -> PieceStream:
        return self

    async def __aexit__(self, *fault: object) -> None:
        self.close()

    async def completions(self) -> list[Completion]:
        """Returns all outputs in their order, once every one has ended."""
        pieces: list[list[Piece]] = [[] for _ in range(self.num_outputs)]
        async for index, piece in self:
            pieces[index].append(piece)
        return [_completion(index, found) for index, found in enumerate(pieces)]


def _completion(index: int, pieces: Sequence[Piece]) -> Completion:
    text = "".join(piece.text for piece in pieces)
    tokens = [token for piece in pieces for token in piece.tokens]
    last = pieces[-1]
    return Completion(index, text, tokens, str(last.finish_reason), last.stats or {}, last.error)
