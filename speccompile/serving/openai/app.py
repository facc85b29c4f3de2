# SPDX-License-Identifier: Apache-2.0
"""The application: routes over a service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

import speccompile
from speccompile.serving.openai.chat import ChatApi
from speccompile.serving.openai.completions import CompletionApi
from speccompile.serving.openai.errors import INVALID, NOT_FOUND, SERVER, ApiError
from speccompile.serving.openai.messages import MessagesApi
from speccompile.serving.openai.responses import ResponsesApi
from speccompile.serving.openai.server import Api, BodyCheck, KeyCheck, OpenAIServer
from speccompile.serving.openai.token_routes import token_routes

APIS: tuple[type[Api], ...] = (CompletionApi, ChatApi, ResponsesApi, MessagesApi)


def api_routes(server: OpenAIServer) -> APIRouter:
    """Returns the routes of the APIs, /v1/models, /metrics and /health."""
    router = APIRouter()
    for api in APIS:
        schema = {"content": {"application/json": {"schema": api.body.model_json_schema()}}, "required": True}
        router.add_api_route(api.path, server.route(api), methods=["POST"], openapi_extra={"requestBody": schema})

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Returns the model that is served, and its adapters."""
        return {"object": "list", "data": [_model(server, name) for name in server.model_names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Returns the model by its name."""
        server.check_model(name)
        return _model(server, name)

    @router.get("/metrics")
    def metrics() -> Response:
        """Returns counts, gauges and histograms for Prometheus."""
        return Response(server.metrics.text(), media_type=server.metrics.content_type)

    @router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)  # as hosts of containers ask
    @router.get("/health")
    def health() -> JSONResponse:
        """Returns 200 while the server takes requests, 503 after its shutdown began; waits while the engine hangs."""
        stats = server.service.stats()
        status = "ok" if stats["is_open"] else stats["fault"] or "shutting down"
        return JSONResponse({"status": status, "model": server.model_name}, 200 if stats["is_open"] else 503)

    return router


def _model(server: OpenAIServer, name: str) -> dict[str, Any]:
    parent = {} if name == server.model_name else {"parent": server.model_name}
    return {
        "id": name,
        **parent,
        "object": "model",
        "created": server.created,
        "owned_by": "speccompile",
        "max_model_len": server.engine.context.max_seq_len,
        "certificate": server.certificate,
    }


def make_app(server: OpenAIServer, more_routes: Sequence[Callable[[OpenAIServer], APIRouter]] = ()) -> FastAPI:
    """Returns the application. `more_routes`: other routes over the same service, such as a page's."""
    # The interactive documentation would load its scripts from elsewhere.
    app = FastAPI(title="speccompile", version=speccompile.__version__, docs_url=None, redoc_url=None)
    for routes in (api_routes, token_routes, *more_routes):
        app.include_router(routes(server))
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_fault)
    options = server.options
    app.add_middleware(BodyCheck, max_bytes=options.max_request_bytes, timeout_s=options.body_timeout_s)
    if options.api_keys:
        app.add_middleware(KeyCheck, keys=options.api_keys)
    if options.allowed_origins:
        origins = list(options.allowed_origins)  # their clients send headers of their own
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    return app


async def _answer_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.json_from_error(), error.status, headers=error.headers)


async def _answer_fault(http: HttpRequest, error: Exception) -> Response:
    fault = ApiError(
        500, f"The server failed: {type(error).__name__}. Its log says more.", SERVER, None, "internal_error"
    )
    return JSONResponse(fault.json_from_error(), fault.status)


async def _answer_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = NOT_FOUND if error.status_code == 404 else INVALID
    wrapped = ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}.", kind)
    return JSONResponse(wrapped.json_from_error(), error.status_code, headers=error.headers)
