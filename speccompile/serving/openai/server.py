# SPDX-License-Identifier: Apache-2.0
"""From an HTTP request to its answer: the steps that all APIs share, and the checks of keys and bodies before them.

A blank key (an unset variable, an empty secret) would accept every request, so it stops the server's start.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speccompile.bundle.publish import certificate_facts
from speccompile.common.chat_template import ChatTemplate, read_chat_template
from speccompile.errors import RuntimeFault
from speccompile.runtime.requests import Request
from speccompile.runtime.service import OutputStream, Service
from speccompile.serving.openai.errors import (
    AUTHENTICATION,
    NOT_FOUND,
    ApiError,
    error_from_fault,
    error_from_validation,
    timeout_error,
)
from speccompile.serving.openai.events import Answer
from speccompile.serving.openai.logprobs import TokenTexts
from speccompile.serving.openai.metrics import Metrics
from speccompile.serving.openai.tools import ChatFormats, formats_from_options

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
AnyBody = TypeVar("AnyBody", bound=BaseModel)
DISCONNECTED = 499  # status in the log: the client has disconnected


# These show nothing of the model or its requests.
OPEN_PATHS = frozenset({"/", "/health", "/ping"})
VARIABLE = "SPECCOMPILE_API_KEY"
_BETWEEN = re.compile(r"[\s,]+")


@dataclass(frozen=True)
class ServerOptions:
    """How the application answers.

    Args:
        allowed_origins: of pages that browsers may send requests from; none: only pages of this server.
        tool_call_parser: how the model writes tool calls: a name of `tool_formats.TOOL_FORMATS`, `auto` (by its chat
            template) or `none`.
    """

    model_name: str | None = None  # what `model` has to be; None: the name of the bundle's folder
    api_keys: tuple[str, ...] = ()  # a request needs one of them; empty: no key is needed
    max_request_bytes: int = 1 << 20  # size of a body at most
    body_timeout_s: float = 30.0  # seconds that a body may take to arrive
    allowed_origins: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    request_metrics: bool = False  # give `metrics` with every answer of one choice, in vLLM's shape
    vllm_metrics: bool = False  # give the counts of speculation by vLLM's names too, for Prometheus

    def __post_init__(self) -> None:
        """Refuses blank keys, which would accept every request."""
        check_keys(self.api_keys)


class OpenAIServer:
    """The state that the routes share. `service`: takes the requests; the caller starts and closes it."""

    def __init__(self, service: Service, options: ServerOptions) -> None:
        self.service, self.options, self.engine = service, options, service.engine
        bundle = service.engine.bundle
        self.template: ChatTemplate | None = None
        self._formats: ChatFormats | None = None
        if bundle is not None and bundle.tokenizer_path is not None:
            self.template = read_chat_template(bundle.tokenizer_path.parent)
        self.model_name = options.model_name or (bundle.path.resolve().name if bundle else "speccompile")
        self.token_texts = TokenTexts(self.engine.tokenizer)
        self.metrics = Metrics(service, self.model_name if options.vllm_metrics else None)
        if self.model_name in self.engine.adapters:
            raise RuntimeFault(
                "the name of the served model",
                f"{self.model_name!r}, an adapter's name too",
                "a name of its own for each",
                "Give --served-model-name another name.",
            )
        # Two answers with the same fingerprint and seed are the same text.
        mark = "synthetic" if self.engine.verifier.rates else "sc"
        self.fingerprint = f"{mark}-{bundle.manifest['digest'][:12]}" if bundle else None
        self.certificate = certificate_facts(bundle.path, bundle.manifest) if bundle else None
        self.created = int(time.time())

    def check_model(self, name: str | None) -> None:
        """Refuse a request for a model that is not served here."""
        if name is not None and name not in self.model_names:
            others = "".join(f", `{adapter}`" for adapter in self.engine.adapters)
            message = f"The model `{name}` is not served here; `{self.model_name}`{others} is."
            raise ApiError(404, message, NOT_FOUND, "model", "model_not_found")

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.model_name, *self.engine.adapters)

    def submit(self, requests: Sequence[Request], model: str | None = None) -> OutputStream:
        """Submit requests to a model of `model_names`; None: the bundle's."""
        if model is not None and model != self.model_name:
            requests = [replace(one, sampling=replace(one.sampling, adapter=model)) for one in requests]
        try:
            return self.service.stream(*requests)
        except RuntimeFault as fault:
            raise error_from_fault(fault) from fault

    @property
    def formats(self) -> ChatFormats:
        """How the model writes tool calls and reasoning."""
        if self._formats is None:
            options, tokenizer = self.options, self.engine.tokenizer
            self._formats = formats_from_options(
                options.tool_call_parser, options.reasoning_parser, self.template, tokenizer
            )
        return self._formats

    def route(self, api: type[Api]) -> Callable[[HttpRequest], Awaitable[Response]]:
        """Returns the function that answers an API's requests, whole or as a stream."""

        async def respond(http: HttpRequest) -> Response:
            try:
                body = await read_body(http, api.body)
                self.check_model(body.model)
                if (answer := await unless_disconnected(http, api.answer_from_body(self, body))) is None:
                    return Response(status_code=DISCONNECTED)
                answer.step_outputs = self.submit(answer.requests, body.model)
                writer = api(self, body, answer)
                if body.stream:
                    return EventStream(writer.stream(), answer.step_outputs.close)
                try:
                    is_whole = await unless_disconnected(http, answer.finish())
                finally:
                    answer.step_outputs.close()
                return JSONResponse(writer.whole()) if is_whole else Response(status_code=DISCONNECTED)
            except ApiError as error:
                return JSONResponse(api.json_from_error(error), error.status, headers=error.headers)

        return respond


class Api(ABC):
    """One API: its body, and one answer in its shape."""

    path: ClassVar[str]
    body: ClassVar[Any]

    @abstractmethod
    def __init__(self, server: OpenAIServer, body: Any, answer: Answer) -> None: ...

    @staticmethod
    @abstractmethod
    async def answer_from_body(server: OpenAIServer, body: Any) -> Answer:
        """Returns the answer to a body, whose requests are not submitted yet."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Returns an answer that has ended."""

    @abstractmethod
    def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields the answer as server-sent events. Where it fails, the last ones say so."""

    @staticmethod
    def json_from_error(error: ApiError) -> dict[str, Any]:
        """Returns an error in the shape of the API."""
        return error.json_from_error()


async def read_body(http: HttpRequest, kind: type[AnyBody]) -> AnyBody:
    """Returns the body of a request."""
    try:
        body: AnyBody = kind.model_validate_json(await http.body())
    except ValidationError as fault:
        raise error_from_validation(fault) from fault
    return body


def event_from_json(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends events as they come. `on_close`: called at the end, also if nothing of `events` was read."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._on_close = events, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    """Returns the result of some work; None if the client disconnects first, which cancels the work."""
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
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in OPEN_PATHS:
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
