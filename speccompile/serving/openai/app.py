# SPDX-License-Identifier: Apache-2.0
"""The application: routes over a service."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from speccompile.bundle.certificates import certificate_facts
from speccompile.common.chat_template import ChatTemplate, read_chat_template
from speccompile.errors import RuntimeFault
from speccompile.runtime.output_stream import OutputStream
from speccompile.runtime.requests import Request
from speccompile.runtime.service import Service
from speccompile.serving.openai.echo import Echo
from speccompile.serving.openai.errors import (
    INVALID,
    NOT_FOUND,
    SERVER,
    ApiError,
    error_from_fault,
    error_from_validation,
)
from speccompile.serving.openai.keys import check_keys
from speccompile.serving.openai.limits import BodyCheck, KeyCheck
from speccompile.serving.openai.logprobs import TokenTexts
from speccompile.serving.openai.message import MessageReader
from speccompile.serving.openai.metrics import Metrics
from speccompile.serving.openai.protocol import ChatBody, CompletionBody, Sampled, StreamOptions
from speccompile.serving.openai.requests import request_from_chat, requests_from_completion
from speccompile.serving.openai.responses import CHAT, COMPLETION, Form, Head, Usage, chunks, whole_answer
from speccompile.serving.openai.stream import EventStream, unless_disconnected
from speccompile.serving.openai.tools import ChatFormats, formats_from_options
from speccompile.version import VERSION

Body = TypeVar("Body", bound=BaseModel)
HUNG_UP = 499  # for the log: the client has gone


@dataclass(frozen=True)
class ServerOptions:
    """How the application answers.

    Args:
        model_name: what `model` has to be; None: the name of the bundle's folder.
        api_keys: a request needs one of them; empty: no key is needed.
        body_timeout_s: seconds that a body may take to arrive.
        allowed_origins: of pages that browsers may send requests from; none: only pages of this server.
        tool_call_parser: how the model writes tool calls: a name of `tool_formats.TOOL_FORMATS`; `auto`: as its chat
            template says; `none`.
        request_metrics: give `metrics` with every answer of one choice, in vLLM's shape.
        vllm_metrics: give the counts of speculation by vLLM's names too, for Prometheus.

    Raises:
        RuntimeFault: a key is blank.
    """

    model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    max_request_bytes: int = 1 << 20
    body_timeout_s: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    request_metrics: bool = False
    vllm_metrics: bool = False

    def __post_init__(self) -> None:
        """Refuses keys with which every request would be accepted."""
        check_keys(self.api_keys)


class OpenAIServer:
    """What the routes share.

    Args:
        service: takes the requests; the caller starts and closes it.
    """

    def __init__(self, service: Service, options: ServerOptions) -> None:
        self.service, self.options = service, options
        bundle = service.engine.bundle
        self.template: ChatTemplate | None = None
        self._formats: ChatFormats | None = None
        if bundle is not None and bundle.tokenizer_path is not None:
            self.template = read_chat_template(bundle.tokenizer_path.parent)
        self.model_name = options.model_name or (bundle.path.resolve().name if bundle else "speccompile")
        self.metrics = Metrics(service, self.model_name if options.vllm_metrics else None)
        # Two answers with the same fingerprint and seed are the same text.
        self.fingerprint = f"sc-{bundle.manifest['digest'][:12]}" if bundle else None
        self.certificate = certificate_facts(bundle.path, bundle.manifest) if bundle else None
        self.created = int(time.time())

    def check_model(self, name: str | None) -> None:
        """Refuse a request for a model that is not served here.

        Raises:
            ApiError: it is another one.
        """
        if name is not None and name != self.model_name:
            message = f"The model `{name}` is not served here; `{self.model_name}` is."
            raise ApiError(404, message, NOT_FOUND, "model", "model_not_found")

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Submit requests.

        Raises:
            ApiError: they were not taken.
        """
        try:
            return self.service.stream(*requests)
        except RuntimeFault as fault:
            raise error_from_fault(fault) from fault

    @property
    def formats(self) -> ChatFormats:
        """How the model writes tool calls and reasoning."""
        if self._formats is None:
            options, tokenizer = self.options, self.service.engine.tokenizer
            self._formats = formats_from_options(
                options.tool_call_parser, options.reasoning_parser, self.template, tokenizer
            )
        return self._formats

    async def respond(
        self,
        http: HttpRequest,
        form: Form,
        body: Sampled,
        requests: Sequence[Request],
        reader: Callable[[], MessageReader] | None = None,
    ) -> Response:
        """Answer a request, at once or as a stream."""
        identity = {
            "id": f"{form.prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.model_name,
            "system_fingerprint": self.fingerprint,
        }
        asked = body.stream_options or StreamOptions()
        usage = Usage(sum(len(request.prompt) for request in requests), body.n)
        running = usage if asked.continuous_usage_stats else None
        texts = None if body.num_logprobs is None else TokenTexts(self.service.engine.tokenizer)
        told = asked.include_usage, body.return_stats, texts, reader, self.options.request_metrics, running
        head = Head(form, identity, *told, self._echo(body, requests))
        step_outputs = self.submit(requests)
        if body.stream:
            return EventStream(chunks(head, step_outputs, usage), step_outputs.close)
        try:
            whole = await unless_disconnected(http, whole_answer(head, step_outputs, usage))
        finally:
            step_outputs.close()
        return Response(status_code=HUNG_UP) if whole is None else JSONResponse(whole)

    def _echo(self, body: Sampled, requests: Sequence[Request]) -> Echo | None:
        """Returns what is told of the prompts."""
        has_field, has_text = body.prompt_logprobs is not None, isinstance(body, CompletionBody) and body.echo
        if not (has_field or has_text):
            return None
        given = body.prompts() if isinstance(body, CompletionBody) else [""]
        tokenizer = self.service.engine.tokenizer

        def text(prompt: str | list[int]) -> str:
            if isinstance(prompt, str) or tokenizer is None:
                return prompt if isinstance(prompt, str) else ""
            return str(tokenizer.decode(prompt, skip_special_tokens=False))

        prompts = [
            (text(prompt), cast("Sequence[int]", request.prompt))
            for prompt, request in zip(given, requests, strict=True)
            for _ in range(body.n)
        ]
        is_all = isinstance(body, CompletionBody) and body.tells_prompt_alone
        return Echo(prompts, TokenTexts(tokenizer), has_text, has_field, is_all)


async def read_body(http: HttpRequest, kind: type[Body]) -> Body:
    """Returns the body of a request.

    Raises:
        ApiError: it does not have the fields and types of the API.
    """
    try:
        body: Body = kind.model_validate_json(await http.body())
    except ValidationError as fault:
        raise error_from_validation(fault) from fault
    return body


def api_routes(server: OpenAIServer) -> APIRouter:
    """Returns the routes below /v1, /metrics and /health."""
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=_body_schema(CompletionBody))
    async def complete(http: HttpRequest) -> Response:
        """Continue one or more prompts."""
        body = await read_body(http, CompletionBody)
        server.check_model(body.model)
        requests = await unless_disconnected(http, requests_from_completion(body, server.service.engine))
        if requests is None:
            return Response(status_code=HUNG_UP)
        return await server.respond(http, COMPLETION, body, requests)

    @router.post("/v1/chat/completions", openapi_extra=_body_schema(ChatBody))
    async def chat(http: HttpRequest) -> Response:
        """Answer the last message of a chat."""
        body = await read_body(http, ChatBody)
        server.check_model(body.model)
        made = request_from_chat(body, server.service.engine, server.template, server.formats)
        if (found := await unless_disconnected(http, made)) is None:
            return Response(status_code=HUNG_UP)
        return await server.respond(http, CHAT, body, [found[0]], found[1])

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(server)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return _model(server)

    @router.get("/metrics")
    def metrics() -> Response:
        return Response(server.metrics.text(), media_type=server.metrics.content_type)

    @router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)  # as hosts of containers ask
    @router.get("/health")
    def health() -> JSONResponse:
        """200 while requests are taken, 503 once the server shuts down; no answer while the engine hangs in a step."""
        stats = server.service.stats()
        status = "ok" if stats["is_open"] else stats["fault"] or "shutting down"
        return JSONResponse({"status": status, "model": server.model_name}, 200 if stats["is_open"] else 503)

    return router


def _model(server: OpenAIServer) -> dict[str, Any]:
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "speccompile",
        "max_model_len": server.service.engine.context.max_seq_len,
        "certificate": server.certificate,
    }


def _body_schema(kind: type[Sampled]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


def make_app(server: OpenAIServer, more_routes: Sequence[Callable[[OpenAIServer], APIRouter]] = ()) -> FastAPI:
    """Returns the application.

    Args:
        more_routes: other routes over the same service, such as a page's.
    """
    # The interactive documentation would load its scripts from elsewhere.
    app = FastAPI(title="speccompile", version=VERSION, docs_url=None, redoc_url=None)
    for routes in (api_routes, *more_routes):
        app.include_router(routes(server))
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_fault)
    options = server.options
    app.add_middleware(BodyCheck, max_bytes=options.max_request_bytes, timeout_s=options.body_timeout_s)
    if options.api_keys:
        app.add_middleware(KeyCheck, keys=options.api_keys)
    if options.allowed_origins:
        headers = ["Authorization", "Content-Type"]
        origins = list(options.allowed_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=headers)
    return app


async def _answer_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.json_from_error(), error.status, headers=error.headers)


async def _answer_fault(http: HttpRequest, error: Exception) -> Response:
    """Answers an unexpected exception with an error 500; its traceback is in the log."""
    fault = ApiError(
        500, f"The server failed: {type(error).__name__}. Its log says more.", SERVER, None, "internal_error"
    )
    return JSONResponse(fault.json_from_error(), fault.status)


async def _answer_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = NOT_FOUND if error.status_code == 404 else INVALID
    wrapped = ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}.", kind)
    return JSONResponse(wrapped.json_from_error(), error.status_code, headers=error.headers)
