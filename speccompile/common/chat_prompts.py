# SPDX-License-Identifier: Apache-2.0
"""Prompts of conversations: messages as templates read them, rendered by the one beside a tokenizer, as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.common.extras import install_command
from speccompile.common.json_reader import parse_json
from speccompile.common.tokenizer_file import TEMPLATE_FILE, encode_text, read_template_file
from speccompile.errors import BundleError, RuntimeFault

if TYPE_CHECKING:
    from speccompile.common.chat_template import ChatTemplate


_TODO = 'Write [{"role": "user", "content": "..."}].'
_PARTS = "a text, or a list of parts of the types text and image"


def find_template(folder: Path | None, where: str) -> ChatTemplate:
    """Returns the chat template of a tokenizer's folder. `folder`: None: there is no tokenizer."""
    if folder is None or read_template_file(folder) is None:
        todo = f"Give a text as it is (generate --raw), or put {TEMPLATE_FILE} beside the tokenizer and build again."
        got = "no chat template, as there is no tokenizer" if folder is None else f"no chat template in {folder}"
        raise BundleError(where, got, "a model that was trained on conversations", todo)
    try:
        from speccompile.common.chat_template import read_chat_template
    except ModuleNotFoundError as fault:
        todo = f"Install them: {install_command('serve')}. Or give a text as it is (generate --raw)."
        raise RuntimeFault(where, f"no package {fault.name}", "the packages of the extra [serve]", todo) from fault
    template = read_chat_template(folder)
    assert template is not None
    return template


def check_messages(messages: Any, where: str = "messages") -> None:
    """Refuses what is no conversation. Raises RuntimeFault: no list, or a message without role or content."""

    def refuse(at_message: str, got: Any, expected: str) -> None:
        raise RuntimeFault(at_message, f"{got!r:.60}", expected, _TODO)

    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        refuse(where, messages, "a list of messages with `role` and `content`")
    for at, message in enumerate(messages):
        at_message = f"{where}[{at}]"
        if not isinstance(message, Mapping):
            refuse(at_message, message, "an object with `role` and `content`")
        if not isinstance(message.get("role"), str) or not message["role"]:
            refuse(f"{at_message}.role", message.get("role"), "a name such as system, user or assistant")
        content = message.get("content")
        is_list = isinstance(content, Sequence) and not isinstance(content, str)
        if content is None and message.get("tool_calls"):
            continue
        if not isinstance(content, str) and not (is_list and all(_is_part(part) for part in content)):
            refuse(f"{at_message}.content", content, _PARTS)


def _is_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    return part.get("type") == "image" or (part.get("type") == "text" and isinstance(part.get("text"), str))


def message_for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as chat templates read it: parts of text joined, arguments of tool calls as objects."""
    content = message.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str) and all(part["type"] == "text" for part in content):
        content = "".join(part["text"] for part in content)
    told = {**message, "content": content}
    if message.get("tool_calls"):
        told["tool_calls"] = [_call_for_template(call) for call in message["tool_calls"]]
    return told


def _call_for_template(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse_json(function["arguments"].strip() or "{}")
    except ValueError:  # also where it is nested too deeply
        return call
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def tokens_of_messages(
    tokenizer: Any,
    folder: Path | None,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
    *,
    where: str = "messages",
    expand: Callable[[str], str] = str,
) -> list[int]:
    """Returns the token ids of a conversation with the assistant's turn opened, as the server has them.

    Args:
        folder: of the tokenizer, with the chat template; None: there is none.
        expand: returns the rendered text with the tokens of its images.

    Raises:
        RuntimeFault: they are no messages, or the template refuses them; see also `find_template`.
    """
    check_messages(messages, where)
    template = find_template(folder, where)
    text = template.render([message_for_template(message) for message in messages], True, variables or {}, where)
    return encode_text(tokenizer, expand(text), where, special=False)  # templates write special tokens themselves


CHATS = Path(__file__).with_name("chats.jsonl")


@dataclass(frozen=True)
class Chat:
    """A conversation whose next turn is the assistant's."""

    category: str  # kind of text: code, dialogue, maths, rewriting or languages
    messages: tuple[Mapping[str, str], ...]


def read_chats() -> list[Chat]:
    """Returns the conversations of `CHATS`; their categories take turns, so that the first few are of all kinds."""
    lines = CHATS.read_text(encoding="utf-8").splitlines()
    return [Chat(row["category"], tuple(row["messages"])) for row in map(json.loads, lines)]
