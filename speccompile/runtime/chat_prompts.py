# SPDX-License-Identifier: Apache-2.0
"""Prompts of conversations: the chat template beside a tokenizer, whose package need not be installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.common.extras import install_command
from speccompile.errors import BundleError, RuntimeFault

if TYPE_CHECKING:
    from speccompile.runtime.chat_template import ChatTemplate


def find_template(folder: Path | None, where: str) -> ChatTemplate:
    """Returns the chat template of a tokenizer's folder.

    Args:
        folder: None: there is no tokenizer.
        where: for messages.

    Raises:
        RuntimeFault: the package that renders it is not installed.
        BundleError: there is none.
    """
    try:
        from speccompile.runtime.chat_template import read_chat_template
    except ModuleNotFoundError as fault:
        todo = f"Install them: {install_command('serve')}."
        raise RuntimeFault(where, f"no package {fault.name}", "the packages of the extra [serve]", todo) from fault
    template = None if folder is None else read_chat_template(folder)
    if template is None:
        todo = "Give a text as it is (generate), or put chat_template.jinja beside the tokenizer and build again."
        raise BundleError(where, "no chat template", "a model that was trained on conversations", todo)
    return template


def prompt_of_messages(folder: Path | None, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Returns the text of a conversation with the assistant's turn opened.

    Raises:
        RuntimeFault: they are no messages, or the template refuses them; see also `find_template`.
        BundleError: see `find_template`.
    """
    are_messages = isinstance(messages, Sequence) and all(isinstance(m, Mapping) and "role" in m for m in messages)
    if not are_messages or not messages:
        got = "none" if are_messages and not messages else f"{messages!r:.60}"
        todo = 'Write [{"role": "user", "content": "..."}].'
        raise RuntimeFault("messages", got, "a list of messages with `role` and `content`", todo)
    where = "chat" if folder is None else str(folder)
    return find_template(folder, where).render(messages, True, variables)
