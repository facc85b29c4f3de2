# SPDX-License-Identifier: Apache-2.0
"""The page's routes: the page itself, what it shows of the bundle, and a stream of steps."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from time import perf_counter
from typing import Any, Protocol, cast

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from speccompile.runtime.requests import Request, StepOutput, StepTrace
from speccompile.runtime.service import OutputStream
from speccompile.runtime.text import text_of_token
from speccompile.serving.openai.bodies import Sampled
from speccompile.serving.openai.chat import ChatApi
from speccompile.serving.openai.chat_body import ChatBody, Message
from speccompile.serving.openai.completions import CompletionApi, CompletionBody
from speccompile.serving.openai.errors import error_from_step_output
from speccompile.serving.openai.events import FINISH_REASONS
from speccompile.serving.openai.server import EventStream, OpenAIServer, event_from_json, read_body

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
    own = {"prompt", "as_chat", "before", "n", "stream", "stream_options"}
    given = body.model_dump(exclude=own, exclude_unset=True)
    if body.as_chat and server.template is not None:
        chat = ChatBody(messages=[*body.before, Message(role="user", content=body.prompt)], **given)
        [request] = (await ChatApi.answer_from_body(server, chat)).requests
    else:
        completion = CompletionBody(prompt=body.prompt, **given)
        [request] = (await CompletionApi.answer_from_body(server, completion)).requests
    return request


class Painter(Protocol):
    """The part of `runtime.text.TextSink` that turns one token at a time into text."""

    def push(self, tokens: Sequence[int]) -> tuple[str, int, bool]: ...

    def finish(self) -> str: ...


def json_from_trace(trace: StepTrace, next_text: str) -> dict[str, Any]:
    """Returns the tree of a step: `texts` and `parents` by node, the kept `path`, and the text of the next token."""
    return {"texts": trace.texts, "parents": trace.parents, "path": trace.path, "next": next_text}


async def events(
    step_outputs: OutputStream, painter: Painter | None, tokenizer: Any, num_prompt: int, drafts: Callable[[], str]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events: `start`, a `step` for each step, `end` or `error`."""
    start_s = perf_counter()
    yield event_from_json({"kind": "start", "num_prompt_tokens": num_prompt})
    async for _, step_output in step_outputs:
        if step_output.tokens:
            yield event_from_json(_step(step_output, painter, tokenizer, (perf_counter() - start_s) * 1e3))
        if step_output.finish_reason is None:
            continue
        if step_output.finish_reason not in FINISH_REASONS:
            yield event_from_json({"kind": "error", **error_from_step_output(step_output).json_from_error()})
            return
        tail = painter.finish() if painter is not None else ""
        end = {"reason": step_output.finish_reason, "tail": tail, "stats": step_output.stats, "drafts": drafts()}
        yield event_from_json({"kind": "end", **end})


def _step(step_output: StepOutput, painter: Painter | None, tokenizer: Any, time_ms: float) -> dict[str, Any]:
    texts = [painter.push([token])[0] if painter is not None else f" {token}" for token in step_output.tokens]
    step: dict[str, Any] = {
        "kind": "step",
        "tokens": [list(pair) for pair in zip(texts, step_output.kinds, strict=True)],
        "num_draft_tokens": step_output.num_draft_tokens,
        "num_accepted": step_output.num_accepted,
        "is_bonus": step_output.is_bonus,
        "time_ms": round(time_ms, 2),
    }
    if step_output.trace is not None:
        following = step_output.trace.next_token
        text = text_of_token(tokenizer, following) if tokenizer is not None else str(following)
        step["tree"] = json_from_trace(step_output.trace, text)
    return step


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
