# SPDX-License-Identifier: Apache-2.0
"""Routes that count, encode and decode tokens, and the version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

import speccompile
from speccompile.errors import RuntimeFault
from speccompile.serving.openai.bodies import Body, TokenId
from speccompile.serving.openai.chat import chat_from_fields, prompt_from_chat
from speccompile.serving.openai.chat_body import ChatBody
from speccompile.serving.openai.completions import encode
from speccompile.serving.openai.errors import ApiError, error_from_fault, error_from_validation
from speccompile.serving.openai.messages import CountBody, MessagesApi
from speccompile.serving.openai.server import OpenAIServer, read_body


class TokenizeBody(Body):
    """`POST /tokenize` of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


def token_routes(server: OpenAIServer) -> APIRouter:
    """Returns /tokenize, /detokenize, /v1/messages/count_tokens and /version."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(http: HttpRequest) -> dict[str, Any]:
        """Returns the token ids of a prompt, or of messages as their chat is read."""
        engine = server.engine
        chat, gives_texts = _chat_of(await http.body())
        if chat is not None:
            server.check_model(chat.model)
            prompt = await prompt_from_chat(server, chat)
            return _answer(server, prompt.tokens, gives_texts)
        body = await read_body(http, TokenizeBody)
        server.check_model(body.model)
        tokens = await encode(engine, body.prompt, special=body.add_special_tokens)
        return _answer(server, tokens, bool(body.return_token_strs))

    @router.post("/detokenize")
    async def detokenize(http: HttpRequest) -> dict[str, str]:
        """Returns the text of token ids, with that of special tokens."""
        body = await read_body(http, DetokenizeBody)
        server.check_model(body.model)
        engine = server.engine
        if engine.tokenizer is None:
            raise ApiError(400, "This bundle has no tokenizer.", param="tokens", code="no_tokenizer")
        try:
            engine.check_vocabulary("tokens", body.tokens)
        except RuntimeFault as fault:
            raise error_from_fault(fault) from fault
        return {"prompt": engine.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    @router.post("/v1/messages/count_tokens")
    async def count(http: HttpRequest) -> Response:
        """Returns the number of tokens of the input of a message, in Anthropic's shape."""
        try:
            chat = chat_from_fields((await read_body(http, CountBody)).chat())
            server.check_model(chat.model)
            prompt = await prompt_from_chat(server, chat)
        except ApiError as error:
            return JSONResponse(MessagesApi.json_from_error(error), error.status, headers=error.headers)
        return JSONResponse({"input_tokens": len(prompt.tokens)})

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Returns speccompile's version."""
        return {"version": speccompile.__version__}

    return router


def _chat_of(raw: bytes) -> tuple[ChatBody | None, bool]:
    try:
        data = from_json(raw)
    except ValueError:
        return None, False  # refused as a body of the other form
    if not isinstance(data, dict) or "messages" not in data:
        return None, False
    try:
        texts = _TokenTexts.model_validate({"return_token_strs": data.pop("return_token_strs", None)}, strict=True)
        return ChatBody.model_validate(data), bool(texts.return_token_strs)
    except ValidationError as fault:
        raise error_from_validation(fault) from fault


class _TokenTexts(BaseModel):
    return_token_strs: bool | None = None


def _answer(server: OpenAIServer, tokens: Sequence[int], gives_texts: bool) -> dict[str, Any]:
    engine = server.engine
    texts = [engine.tokenizer.id_to_token(token) for token in tokens] if gives_texts and engine.tokenizer else None
    return {
        "count": len(tokens),
        "max_model_len": engine.context.max_seq_len,
        "tokens": list(tokens),
        "token_strs": texts,
    }
