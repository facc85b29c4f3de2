# SPDX-License-Identifier: Apache-2.0
"""Where a chat template lies beside a tokenizer; what renders it is not needed to find it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccompile.common.json_reader import read_json_object
from speccompile.errors import BundleError

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
_TODO = "Build the bundle again, or copy it again from where it was built."
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def knows_chats(folder: Path | None) -> bool:
    return folder is not None and read_template_file(folder) is not None


def read_template_file(folder: Path) -> tuple[str, dict[str, str]] | None:
    """Returns a chat template's text and the special tokens by name, e.g. `bos_token`; None where there is none.

    Raises:
        BundleError: tokenizer_config.json is no JSON object, or its template is no text.
    """
    config = read_json_object(folder / CONFIG_FILE, BundleError, _TODO) if (folder / CONFIG_FILE).exists() else {}
    path = folder / TEMPLATE_FILE
    source = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
    if isinstance(source, list):  # several by name, as older tokenizers have them
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        where, got = str(folder / CONFIG_FILE), f"a chat_template of type {type(source).__name__}"
        raise BundleError(where, got, "a text", "Correct it in the checkpoint and build the bundle again.")
    tokens = {name: _text_of_token(config.get(name)) for name in _SPECIAL}
    return source, {name: text for name, text in tokens.items() if text is not None}


def _text_of_token(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
