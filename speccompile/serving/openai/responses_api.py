# SPDX-License-Identifier: Apache-2.0
"""Answers of `POST /v1/responses`, in the shape of OpenAI's Responses API."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

from speccompile.runtime.output_stream import OutputStream
from speccompile.serving.openai.blocks import CALL, REASONING, TEXT, Block, read_blocks
from speccompile.serving.openai.errors import ApiError
from speccompile.serving.openai.message import MessageReader
from speccompile.serving.openai.responses import Usage


def _status(is_cut: bool) -> str:
    return "incomplete" if is_cut else "completed"


def _item(block: Block, status: str) -> dict[str, Any]:
    if block.kind == CALL:
        call = {"id": f"fc_{block.identity}", "type": "function_call", "call_id": block.identity, "name": block.name}
        return {**call, "arguments": block.text, "status": status}
    identity = f"{'rs' if block.kind == REASONING else 'msg'}_{block.index}"
    if block.kind == REASONING:
        summary = [{"type": "summary_text", "text": block.text}]
        return {"id": identity, "type": "reasoning", "summary": summary, "status": status}
    content = [_part(block)] if block.text or status == "completed" else []
    return {"id": identity, "type": "message", "status": status, "role": "assistant", "content": content}


def _part(block: Block, text: str | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": block.text if text is None else text, "annotations": []}


class ResponsesAnswer:
    """One answer."""

    def __init__(
        self,
        body: dict[str, Any],
        model: str,
        step_outputs: OutputStream,
        reader: Callable[[], MessageReader] | None,
        usage: Usage,
    ) -> None:
        self._step_outputs, self._reader, self._usage = step_outputs, reader, usage
        self._head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools") or [],
        }

    def _whole(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        used = self._usage
        usage = {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.reused_tokens},
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used.prompt_tokens + used.completion_tokens,
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ends = {"status": status, "incomplete_details": details, "output": output}
        return {**self._head, **ends, "usage": None if status == "in_progress" else usage}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream."""
        number = 0

        def event(kind: str, **fields: Any) -> bytes:
            nonlocal number
            data = json.dumps({"type": f"response.{kind}", "sequence_number": number, **fields}, ensure_ascii=False)
            number += 1
            return f"event: response.{kind}\ndata: {data}\n\n".encode()

        for kind in ("created", "in_progress"):
            yield event(kind, response=self._whole("in_progress", []))
        output: list[dict[str, Any]] = []
        try:
            async for news in read_blocks(self._step_outputs, self._reader, self._usage):
                block = news.block
                if news.last is not None:
                    status = _status(news.last.finish_reason != "stop")
                    yield event(status, response=self._whole(status, output))
                    return
                assert block is not None
                at = {"output_index": block.index}
                item = _item(block, _status(news.is_cut) if news.what == "close" else "in_progress")
                inside = {**at, "item_id": item["id"]}
                if news.what == "open":
                    yield event("output_item.added", **at, item=item)
                    if block.kind == TEXT:
                        yield event("content_part.added", **inside, content_index=0, part=_part(block, ""))
                elif news.what == "delta":
                    if block.kind == CALL:
                        yield event("function_call_arguments.delta", **inside, delta=news.piece)
                    elif block.kind == TEXT:
                        yield event("output_text.delta", **inside, content_index=0, delta=news.piece, logprobs=[])
                    else:
                        yield event("reasoning_summary_text.delta", **inside, summary_index=0, delta=news.piece)
                else:
                    if block.kind == CALL:
                        done = {"name": block.name, "arguments": block.text}
                        yield event("function_call_arguments.done", **inside, **done)
                    elif block.kind == TEXT:
                        yield event("output_text.done", **inside, content_index=0, text=block.text, logprobs=[])
                        yield event("content_part.done", **inside, content_index=0, part=_part(block))
                    output.append(item)
                    yield event("output_item.done", **at, item=item)
        except ApiError as error:
            failed = {"code": error.code, "message": error.message}
            yield event("failed", response={**self._whole("failed", output), "error": failed})

    async def whole(self) -> dict[str, Any]:
        """Returns the answer once it has ended.

        Raises:
            ApiError: it did not come to its end.
        """
        output, status = [], "completed"
        async for news in read_blocks(self._step_outputs, self._reader, self._usage):
            if news.last is not None:
                status = _status(news.last.finish_reason != "stop")
            elif news.what == "close" and news.block is not None:
                output.append(_item(news.block, _status(news.is_cut)))
        return self._whole(status, output)
