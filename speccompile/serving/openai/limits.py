# SPDX-License-Identifier: Apache-2.0
"""Checks before every route: the API key, the size of a body, its type and the time it takes.

A blank key (an unset variable, an empty secret) would accept every request, so it stops the server's start.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Iterable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speccompile.errors import RuntimeFault
from speccompile.serving.openai.errors import AUTHENTICATION, ApiError, timeout_error

# These show nothing of the model or its requests.
OPEN_PATHS = frozenset({"/", "/health", "/ping"})
VARIABLE = "SPECCOMPILE_API_KEY"
_BETWEEN = re.compile(r"[\s,]+")


def check_keys(keys: Iterable[str], where: str = "api_keys") -> None:
    """Refuses blank keys, and keys with white space or commas, which separate keys in the environment."""
    for key in keys:
        if not key.strip():
            todo = "Give a key, or leave the option away to ask for none. Is a variable or a secret empty?"
            raise RuntimeFault(where, "a blank API key", "a key that is not empty", todo)
        if _BETWEEN.search(key):
            todo = "Give each key by itself: --api-key ONE --api-key OTHER."
            raise RuntimeFault(where, "white space or a comma in an API key", "one key without them", todo)


def keys_from_environment(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the keys in `SPECCOMPILE_API_KEY`, between white space and commas; none where it is not set."""
    text = environment.get(VARIABLE)
    if text is None:
        return ()
    keys = tuple(key for key in _BETWEEN.split(text) if key)
    if not keys:
        todo = f"Give one or more keys, or unset {VARIABLE} to ask for none. Is a secret empty?"
        raise RuntimeFault(VARIABLE, "no API key", "keys between spaces or commas", todo)
    return keys


async def send_error(send: Send, error: ApiError) -> None:
    """Answer with an error."""
    body = json.dumps(error.json_from_error()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> str:
    """Returns the value of a request's header, empty where it has none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


class KeyCheck:
    """Refuses requests without the API key."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        message = "The API key is missing or wrong: send it as `Authorization: Bearer KEY`."
        headers = {"WWW-Authenticate": "Bearer"}
        await send_error(send, ApiError(401, message, AUTHENTICATION, None, "invalid_api_key", headers))

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, bearer = header(scope, b"authorization").partition(" ")
        offered = bearer if scheme.lower() == "bearer" else "", header(scope, b"x-api-key")
        # Every key is compared, each in constant time, so that the time of an answer reveals nothing about the keys.
        same = [hmac.compare_digest(one.strip().encode("latin-1"), key) for one in offered for key in self._keys]
        return any(same)


class BodyCheck:
    """Refuses bodies that are too large or slower than `timeout_s` seconds, or not sent as JSON.

    A page of another origin can make a browser send other types than JSON without asking this server first.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if header(scope, b"content-type").partition(";")[0].strip().lower() != "application/json":
            message = "Send JSON, with `Content-Type: application/json`."
            await send_error(send, ApiError(415, message, code="unsupported_media_type"))
            return
        length = header(scope, b"content-length")
        if length.isdigit() and int(length) > self._max_bytes:
            await send_error(send, self._error())
            return
        await self._counted(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads the body here: so a body without a length has a limit too."""
        try:
            async with asyncio.timeout(self._timeout_s):
                messages = await self._read(receive)
        except TimeoutError:
            await send_error(send, timeout_error("body"))
            return
        except ApiError as error:
            await send_error(send, error)
            return
        if messages[-1]["type"] != "http.request":
            return  # the client has left: there is no one to answer

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> list[Message]:
        messages: list[Message] = []
        num_bytes = 0
        while not messages or messages[-1].get("more_body", False):
            messages.append(await receive())
            num_bytes += len(messages[-1].get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._error()
        return messages

    def _error(self) -> ApiError:
        message = f"The body is larger than {self._max_bytes} bytes."
        return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
