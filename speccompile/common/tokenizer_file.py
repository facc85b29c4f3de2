# SPDX-License-Identifier: Apache-2.0
"""The one reader of tokenizer.json files and of the chat template beside them, with errors of four parts."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from speccompile.common.json_reader import read_json_object
from speccompile.errors import BundleError, RuntimeFault, SpecCompileError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(path: Path, error: type[SpecCompileError], todo: str) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json, without the truncation and padding that training left there.

    Args:
        todo: what the user can do about a damaged file.

    Raises:
        SpecCompileError: of the class `error`: the file is no tokenizer.
    """
    from tokenizers import Tokenizer

    with TokenizerFaults(error, str(path), "a tokenizers file", todo):
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


LONG = 4096  # characters that take longer than waking a thread: `encode` holds Python's lock, `encode_batch` does not


def encode_text(tokenizer: Any, text: str, where: str = "prompt", special: bool = True) -> list[int]:
    """Returns the token ids of a text, `special` ones included.

    Raises:
        RuntimeFault: the text is no Unicode, or the tokenizer fails on it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        got, todo = "text with half of a surrogate pair", "Decode what it was made of as UTF-8."
        raise RuntimeFault(where, got, "Unicode text", todo) from fault
    todo = "Shorten what repeats in it, or give token ids."
    with TokenizerFaults(RuntimeFault, where, "a text that the tokenizer reads", todo):
        if len(text) > LONG and hasattr(tokenizer, "encode_batch_fast"):
            [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=special)
        else:
            encoding = tokenizer.encode(text, add_special_tokens=special)
    return list(encoding.ids)


class TokenizerFaults:
    """Turns the library's faults, which are plain `Exception`s and panics, into an error; others pass."""

    def __init__(self, error: type[SpecCompileError], where: str, expected: str, todo: str) -> None:
        self._error, self._where, self._expected, self._todo = error, where, expected, todo

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and (kind is Exception or kind.__name__ == "PanicException"):
            raise self._error(self._where, str(fault)[:200], self._expected, self._todo) from fault


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
