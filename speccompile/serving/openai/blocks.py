# SPDX-License-Identifier: Apache-2.0
"""An answer as blocks one after another: reasoning, text, tool calls. What other APIs than chat completions show."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from speccompile.runtime.output_stream import OutputStream
from speccompile.runtime.requests import StepOutput
from speccompile.serving.openai.errors import error_from_step_output
from speccompile.serving.openai.message import MessageReader
from speccompile.serving.openai.responses import Usage

REASONING, TEXT, CALL = "reasoning_content", "content", "tool_calls"


@dataclass
class Block:
    """A part of an answer."""

    index: int
    kind: str
    text: str = ""
    identity: str = ""
    name: str = ""


@dataclass(frozen=True)
class News:
    """What happened: a block begins, goes on or ends; the last of an answer has no block.

    Args:
        is_cut: a limit ended the answer in this block, which closes.
    """

    what: str
    block: Block | None = None
    piece: str = ""
    last: StepOutput | None = None
    is_cut: bool = False


async def read_blocks(
    step_outputs: OutputStream, reader: Callable[[], MessageReader] | None, usage: Usage
) -> AsyncIterator[News]:
    """Yields the news of an answer of one choice.

    Args:
        reader: makes the reader of its message; None: its text is its content.

    Raises:
        ApiError: it did not come to its end.
    """
    read, block = (MessageReader(None, None) if reader is None else reader()), None
    num = 0
    async for _, step_output in step_outputs:
        usage.add(step_output)
        is_last = step_output.finish_reason is not None
        if is_last and (error := error_from_step_output(step_output)):
            raise error
        for delta in read.push(step_output.text, is_last):
            [(kind, value)] = delta.items()
            call = value[0] if kind == CALL else None
            if block is None or block.kind != kind or (call is not None and "id" in call):
                if block is not None:
                    yield News("close", block)
                block = Block(num, kind)
                num += 1
                if call is not None:
                    block.identity, block.name = call["id"], call["function"]["name"]
                yield News("open", block)
            piece = value if call is None else call["function"]["arguments"]
            if piece:
                block.text += piece
                yield News("delta", block, piece)
        if is_last:
            if block is not None:
                yield News("close", block, is_cut=step_output.finish_reason != "stop")
            yield News("end", block, last=step_output)
