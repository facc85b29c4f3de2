# SPDX-License-Identifier: Apache-2.0
"""The page's routes: the page itself, what it shows of the bundle, and a stream of steps."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any, cast

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from speccompile.runtime.requests import Request
from speccompile.serving.openai.bodies import Sampled
from speccompile.serving.openai.chat import ChatApi
from speccompile.serving.openai.chat_body import ChatBody, Message
from speccompile.serving.openai.completions import CompletionApi, CompletionBody
from speccompile.serving.openai.server import OpenAIServer, read_body
from speccompile.serving.openai.stream import EventStream
from speccompile.serving.page.trace import events

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class PageBody(Sampled):
    """`POST /page/generate`: one prompt, one output."""

    prompt: str
    as_chat: bool = Field(True, description="The prompt is a user's message, where the model has a chat template.")
    before: list[Message] = Field(default_factory=list, description="Earlier messages of the chat.")


def policy_from_html(html: str) -> str:
    """Returns a content security policy under which the page's own script and style run, and nothing else."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for tag, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
    sources = "; ".join(f"{tag}-src {' '.join(found)}" for tag, found in hashes.items())
    return f"default-src 'none'; connect-src 'self'; img-src data:; {sources}; base-uri 'none'; frame-ancestors 'none'"


def facts_from_server(server: OpenAIServer) -> dict[str, Any]:
    """Returns what the page shows of the bundle."""
    engine = server.service.engine
    recipe = engine.bundle.recipe if engine.bundle is not None else None
    return {
        "model": server.model_name,
        "method": recipe and recipe.method,
        "backend": recipe and recipe.engine.backend,
        "max_seq_len": engine.context.max_seq_len,
        "temperature": engine.defaults.temperature,
        "max_tokens": engine.defaults.max_new_tokens,
        "speculation": server.service.options.speculation,
        "has_template": server.template is not None,
    }


async def _request(server: OpenAIServer, body: PageBody) -> Request:
    """Returns the request of a prompt, as a chat's where the model has a template."""
    own = {"prompt", "as_chat", "before", "n", "stream", "stream_options"}
    given = body.model_dump(exclude=own, exclude_unset=True)
    if body.as_chat and server.template is not None:
        chat = ChatBody(messages=[*body.before, Message(role="user", content=body.prompt)], **given)
        [request] = (await ChatApi.request_from_body(server, chat)).requests
    else:
        completion = CompletionBody(prompt=body.prompt, **given)
        [request] = (await CompletionApi.request_from_body(server, completion)).requests
    return request


def page_routes(server: OpenAIServer) -> APIRouter:
    """Returns the routes `/`, `/page/facts` and `/page/generate`."""
    router = APIRouter(include_in_schema=False)
    html = files("speccompile.serving.page").joinpath("index.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": policy_from_html(html), "Cache-Control": "no-cache"}

    @router.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    @router.get("/page/facts")
    async def facts() -> dict[str, Any]:
        return facts_from_server(server)

    @router.post("/page/generate")
    async def generate(http: HttpRequest) -> Response:
        body = await read_body(http, PageBody)
        engine = server.service.engine
        request = await _request(server, body)
        step_outputs = server.submit([replace(request, wants_trace=True)])
        tokens = list(cast("Sequence[int]", request.prompt))
        painter = engine.text_sink(request.sampling, tokens)

        def drafts() -> str:
            return server.service.draft_report(request.speculation).sentence

        trace = events(step_outputs, painter, engine.tokenizer, len(tokens), drafts)
        return EventStream(trace, step_outputs.close)

    return router
