# SPDX-License-Identifier: Apache-2.0
"""The one reader of tokenizer.json files, with errors of four parts."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from speccompile.errors import SpecCompileError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(path: Path, error: type[SpecCompileError], todo: str) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json, which neither cuts nor fills up texts.

    A file may hold a truncation and a padding that training left there; transformers resets both at every call.

    Args:
        path: the file.
        error: class of the error.
        todo: what the user can do about a damaged file.

    Raises:
        SpecCompileError: of the class `error`: the file is no tokenizer.
    """
    from tokenizers import Tokenizer

    with _LibraryFaults(path, error, todo):
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class _LibraryFaults:
    """Turns the library's faults, which are plain `Exception`s and panics, into an error; others pass."""

    def __init__(self, path: Path, error: type[SpecCompileError], todo: str) -> None:
        self._path, self._error, self._todo = path, error, todo

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and (kind is Exception or kind.__name__ == "PanicException"):
            raise self._error(str(self._path), str(fault)[:200], "a tokenizers file", self._todo) from fault
