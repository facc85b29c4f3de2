# SPDX-License-Identifier: Apache-2.0
"""Answers of `POST /v1/messages`, in the shape of Anthropic's Messages API."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

from speccompile.runtime.output_stream import OutputStream
from speccompile.runtime.requests import StepOutput
from speccompile.serving.openai.blocks import CALL, REASONING, Block, read_blocks
from speccompile.serving.openai.errors import ApiError
from speccompile.serving.openai.message import MessageReader
from speccompile.serving.openai.responses import Usage


def _block(block: Block, is_open: bool) -> dict[str, Any]:
    text = "" if is_open else block.text
    if block.kind == CALL:
        try:
            value = json.loads(text or "{}")
        except ValueError:  # cut off
            value = {}
        return {"type": "tool_use", "id": block.identity, "name": block.name, "input": value}
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _end(last: StepOutput, has_calls: bool) -> dict[str, str | None]:
    reason = "tool_use" if has_calls else "end_turn"
    if last.finish_reason != "stop":
        reason = "max_tokens"
    elif last.stop_string is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": last.stop_string}


class MessagesAnswer:
    """One answer."""

    def __init__(
        self, model: str, step_outputs: OutputStream, reader: Callable[[], MessageReader] | None, usage: Usage
    ) -> None:
        self._step_outputs, self._reader, self._usage = step_outputs, reader, usage
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def _whole(self, content: list[dict[str, Any]], end: dict[str, str | None]) -> dict[str, Any]:
        used = {"input_tokens": self._usage.prompt_tokens, "output_tokens": self._usage.completion_tokens}
        return {**self._head, "content": content, **end, "usage": used}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream."""

        def event(kind: str, **fields: Any) -> bytes:
            data = json.dumps({"type": kind, **fields}, ensure_ascii=False)
            return f"event: {kind}\ndata: {data}\n\n".encode()

        yield event("message_start", message=self._whole([], dict.fromkeys(("stop_reason", "stop_sequence"))))
        has_calls = False
        try:
            async for news in read_blocks(self._step_outputs, self._reader, self._usage):
                block = news.block
                if news.last is not None:
                    used = {"output_tokens": self._usage.completion_tokens}
                    yield event("message_delta", delta=_end(news.last, has_calls), usage=used)
                    yield event("message_stop")
                    return
                assert block is not None
                has_calls = has_calls or block.kind == CALL
                if news.what == "open":
                    yield event("content_block_start", index=block.index, content_block=_block(block, True))
                elif news.what == "close":
                    yield event("content_block_stop", index=block.index)
                else:
                    names = {CALL: ("input_json_delta", "partial_json"), REASONING: ("thinking_delta", "thinking")}
                    kind, key = names.get(block.kind, ("text_delta", "text"))
                    yield event("content_block_delta", index=block.index, delta={"type": kind, key: news.piece})
        except ApiError as error:
            yield event("error", error={"type": "api_error", "message": error.message})

    async def whole(self) -> dict[str, Any]:
        """Returns the answer once it has ended.

        Raises:
            ApiError: it did not come to its end.
        """
        content, has_calls = list[dict[str, Any]](), False
        end: dict[str, str | None] = {}
        async for news in read_blocks(self._step_outputs, self._reader, self._usage):
            if news.last is not None:
                end = _end(news.last, has_calls)
            elif news.what == "close" and news.block is not None:
                has_calls = has_calls or news.block.kind == CALL
                content.append(_block(news.block, False))
        return self._whole(content, end)


def json_from_messages_error(error: ApiError) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}
    kind = "invalid_request_error" if error.status == 400 else kinds.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
