# SPDX-License-Identifier: Apache-2.0
"""The routes of other APIs than OpenAI's completions, over the same service: responses, messages."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from speccompile.runtime.output_stream import OutputStream
from speccompile.serving.openai.app import HUNG_UP, OpenAIServer, read_body
from speccompile.serving.openai.errors import ApiError, error_from_validation
from speccompile.serving.openai.message import MessageReader
from speccompile.serving.openai.messages_api import MessagesAnswer, json_from_messages_error
from speccompile.serving.openai.messages_body import CountBody, MessagesBody
from speccompile.serving.openai.protocol import ChatBody
from speccompile.serving.openai.requests import prompt_from_chat, request_from_chat
from speccompile.serving.openai.responses import Usage
from speccompile.serving.openai.responses_api import ResponsesAnswer
from speccompile.serving.openai.responses_body import ResponsesBody
from speccompile.serving.openai.stream import EventStream, unless_disconnected

Answer = ResponsesAnswer | MessagesAnswer
_MakeAnswer = Callable[[OutputStream, Callable[[], MessageReader] | None, Usage], Answer]


def _chat(server: OpenAIServer, body: ResponsesBody | CountBody) -> ChatBody:
    """Returns the chat that a body stands for.

    Raises:
        ApiError: a value is out of the chat's range; or another model is asked for.
    """
    try:
        chat: ChatBody = ChatBody.model_validate(body.chat())
    except ValidationError as fault:
        raise error_from_validation(fault) from fault
    server.check_model(chat.model)
    return chat


async def _answer(server: OpenAIServer, http: HttpRequest, chat: ChatBody, make: _MakeAnswer) -> Response:
    made = request_from_chat(chat, server.service.engine, server.template, server.formats)
    if (found := await unless_disconnected(http, made)) is None:
        return Response(status_code=HUNG_UP)
    request, reader = found
    step_outputs = server.submit([request])
    answer = make(step_outputs, reader, Usage(len(request.prompt)))
    if chat.stream:
        return EventStream(answer.events(), step_outputs.close)
    try:
        whole = await unless_disconnected(http, answer.whole())
    finally:
        step_outputs.close()
    return Response(status_code=HUNG_UP) if whole is None else JSONResponse(whole)


def agent_routes(server: OpenAIServer) -> APIRouter:
    """Returns /v1/responses, /v1/messages and /v1/messages/count_tokens."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def responses(http: HttpRequest) -> Response:
        chat = _chat(server, await read_body(http, ResponsesBody))
        echoed: dict[str, Any] = from_json(await http.body())
        return await _answer(server, http, chat, functools.partial(ResponsesAnswer, echoed, server.model_name))

    @router.post("/v1/messages")
    @_in_messages_shape
    async def messages(http: HttpRequest) -> Response:
        chat = _chat(server, await read_body(http, MessagesBody))
        return await _answer(server, http, chat, functools.partial(MessagesAnswer, server.model_name))

    @router.post("/v1/messages/count_tokens")
    @_in_messages_shape
    async def count(http: HttpRequest) -> Response:
        chat = _chat(server, await read_body(http, CountBody))
        prompt = await prompt_from_chat(chat, server.service.engine, server.template, server.formats)
        return JSONResponse({"input_tokens": len(prompt.tokens)})

    return router


def _in_messages_shape(route: Callable[[HttpRequest], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    @functools.wraps(route)
    async def answer(http: HttpRequest) -> Response:
        try:
            return await route(http)
        except ApiError as error:
            return JSONResponse(json_from_messages_error(error), error.status, headers=error.headers)

    return answer
