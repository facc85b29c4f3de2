# SPDX-License-Identifier: Apache-2.0
"""The routes of other APIs than OpenAI's completions, over the same service: responses, messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from speccompile.runtime.output_stream import OutputStream
from speccompile.serving.openai.app import HUNG_UP, OpenAIServer
from speccompile.serving.openai.errors import ApiError, error_from_validation
from speccompile.serving.openai.message import MessageReader
from speccompile.serving.openai.messages_api import MessagesAnswer, chat_from_messages, json_from_messages_error
from speccompile.serving.openai.protocol import ChatBody
from speccompile.serving.openai.requests import request_from_chat
from speccompile.serving.openai.responses import Usage
from speccompile.serving.openai.responses_api import ResponsesAnswer, chat_from_responses
from speccompile.serving.openai.stream import EventStream, unless_disconnected

Answer = ResponsesAnswer | MessagesAnswer
_MakeAnswer = Callable[[OutputStream, Callable[[], MessageReader] | None, Usage], Answer]


async def _read_object(http: HttpRequest) -> dict[str, Any]:
    try:
        body = json.loads(await http.body())
    except ValueError as fault:
        raise ApiError(400, f"The body is not JSON: {fault}.", code="invalid_json") from fault
    if not isinstance(body, dict):
        raise ApiError(400, "The body is no JSON object.", code="invalid_value")
    return body


async def _answer(server: OpenAIServer, http: HttpRequest, chat: dict[str, Any], make: _MakeAnswer) -> Response:
    try:
        body = ChatBody.model_validate_json(json.dumps(chat))
    except ValidationError as fault:
        raise error_from_validation(fault) from fault
    server.check_model(body.model)
    request, reader = await request_from_chat(body, server.service.engine, server.template, server.formats)
    step_outputs = server.submit([request])
    answer = make(step_outputs, reader, Usage(len(request.prompt)))
    if body.stream:
        return EventStream(answer.events(), step_outputs.close)
    try:
        whole = await unless_disconnected(http, answer.whole())
    finally:
        step_outputs.close()
    return Response(status_code=HUNG_UP) if whole is None else JSONResponse(whole)


def _checked(convert: Callable[[dict[str, Any]], dict[str, Any]], body: dict[str, Any]) -> dict[str, Any]:
    """Returns the body of a chat; a field of another type than its conversion expects is a 400."""
    try:
        return convert(body)
    except (TypeError, KeyError, AttributeError) as fault:
        message = f"A field has another type than the API's: {type(fault).__name__}: {fault}."
        raise ApiError(400, message, code="invalid_value") from fault


def agent_routes(server: OpenAIServer) -> APIRouter:
    """Returns /v1/responses and /v1/messages."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def responses(http: HttpRequest) -> Response:
        """Answer in the shape of OpenAI's Responses API."""
        body = await _read_object(http)

        def make(outputs: OutputStream, reader: Callable[[], MessageReader] | None, usage: Usage) -> Answer:
            return ResponsesAnswer(body, server.model_name, outputs, reader, usage)

        return await _answer(server, http, _checked(chat_from_responses, body), make)

    @router.post("/v1/messages")
    async def messages(http: HttpRequest) -> Response:
        """Answer in the shape of Anthropic's Messages API."""

        def make(outputs: OutputStream, reader: Callable[[], MessageReader] | None, usage: Usage) -> Answer:
            return MessagesAnswer(server.model_name, outputs, reader, usage)

        try:
            return await _answer(server, http, _checked(chat_from_messages, await _read_object(http)), make)
        except ApiError as error:
            return JSONResponse(json_from_messages_error(error), error.status, headers=error.headers)

    return router
