# SPDX-License-Identifier: Apache-2.0
"""Answers that end their request when the client hangs up: server-sent events, and whole ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"


def event_from_json(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends events as they come.

    Args:
        on_close: called at the end too, also when nothing of `events` was ever read.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._on_close = events, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events or the client end."""
        del scope
        sending, watch = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(disconnection(receive))
        try:
            await asyncio.wait({sending, watch}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._on_close()
            sending.cancel()
            watch.cancel()
            await asyncio.gather(sending, watch, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(http: HttpRequest, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Returns the result of some work; None when the client hangs up before it is there: then the work is cancelled."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnection(http.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def disconnection(receive: Callable[[], Coroutine[Any, Any, Any]] | Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
