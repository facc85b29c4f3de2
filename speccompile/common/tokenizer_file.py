# SPDX-License-Identifier: Apache-2.0
"""The one reader of tokenizer.json files, with errors of four parts."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from speccompile.errors import RuntimeFault, SpecCompileError

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
    """Returns the token ids of a text, `special` ones included. Raises RuntimeFault: the tokenizer fails on it."""
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
