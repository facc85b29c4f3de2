# SPDX-License-Identifier: Apache-2.0
"""Talks to an application without a network: every message between server and application is in the test's hands."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Returns the data of server-sent events; "[DONE]" stays a text."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == ""
        assert all(part.startswith("data: ") for part in parts)
        return [part[6:] if part[6:] == "[DONE]" else json.loads(part[6:]) for part in parts]


async def ask(app, method, path, body=None, *, headers=(), hang_up_after=None, parts=1) -> Reply:
    """Sends one request and returns its reply.

    Args:
        app: ASGI.
        body: JSON-ready, or bytes.
        headers: besides the content type.
        hang_up_after: chunks of the answer; 0: once the request was read.
        parts: in which the body is sent.
    """
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    size = max(1, -(-len(raw) // parts))
    chunks = [raw[at : at + size] for at in range(0, len(raw), size)] or [b""]
    messages = [
        {"type": "http.request", "body": chunk, "more_body": i + 1 < len(chunks)} for i, chunk in enumerate(chunks)
    ]
    reply, hung_up = Reply(), asyncio.Event()
    if hang_up_after == 0:
        hung_up.set()

    async def receive():
        if messages:
            return messages.pop(0)
        await hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {key.decode(): value.decode() for key, value in message["headers"]}
        else:
            reply.chunks.append(message.get("body", b""))
            if hang_up_after is not None and len(reply.chunks) >= hang_up_after:
                hung_up.set()

    given = {"host": "test", **({"content-type": "application/json"} if body is not None else {}), **dict(headers)}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(key.encode(), value.encode()) for key, value in given.items() if value is not None],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }
    await asyncio.wait_for(app(scope, receive, send), 30)
    return reply


def get(app, path, **options) -> Reply:
    return asyncio.run(ask(app, "GET", path, **options))


def post(app, path, body, **options) -> Reply:
    return asyncio.run(ask(app, "POST", path, body, **options))


def ask_now(app, method, path, **options) -> Reply:
    return asyncio.run(ask(app, method, path, **options))
