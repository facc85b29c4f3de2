# SPDX-License-Identifier: Apache-2.0
"""Texts that a recipe names, as token ids. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.errors import CheckpointError, RecipeError

TOKENIZER = "tokenizer.json"
Texts = tuple[tuple[int, ...], ...]
_FIELDS = ("text", "prompt")
_TODO = 'Give a text file, or lines like {"prompt": "..."}.'


def tokens_from_file(
    key: str, path: Path, folder: Path, vocab_size: int, bounds: tuple[int, int], short: str = "Give more text."
) -> Texts:
    """Returns the first tokens of a file as texts.

    Args:
        key: the recipe's, for messages.
        path: JSON lines (.jsonl) with `text` or `prompt`, a text or token ids; any other file is one text.
        folder: with the target's tokenizer.
        vocab_size: token ids are below.
        bounds: tokens that it must have, and how many are read.
        short: what to do where it has fewer.

    Raises:
        RecipeError: it cannot be read, a line is wrong, or it has too few tokens.
        CheckpointError: the tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(folder / TOKENIZER, CheckpointError, "Download the file again.")
    texts: list[tuple[int, ...]] = []
    least, left = bounds
    for where, text in _texts(key, path):
        ids = tokenizer.encode(text).ids if isinstance(text, str) else text
        if any(not 0 <= token < vocab_size for token in ids):
            raise RecipeError(f"{key}: {where}", f"token {max(ids)}", f"ids below {vocab_size}", _TODO)
        texts.append(tuple(ids[:left]))
        left -= len(texts[-1])
        if left == 0:
            break
    if bounds[1] - left < least:
        raise RecipeError(f"{key}: {path}", f"{bounds[1] - left} tokens", f"at least {least}", short)
    return tuple(text for text in texts if text)


def _texts(key: str, path: Path) -> Iterator[tuple[str, str | list[int]]]:
    """Yields where a text stands, and the text or its token ids."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as fault:
        raise RecipeError(f"{key}: {path}", str(fault), "a readable file of UTF-8 text", "Check the file.") from fault
    if path.suffix != ".jsonl":
        yield str(path), content
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield f"{path}:{number}", _text_of_line(key, f"{path}:{number}", line)


def _text_of_line(key: str, where: str, line: str) -> str | list[int]:
    try:
        data = json.loads(line)
    except ValueError as fault:
        raise RecipeError(f"{key}: {where}", str(fault), "one JSON object", _TODO) from fault
    found: Any = None
    if isinstance(data, dict):
        found = next((data[name] for name in _FIELDS if name in data), None)
    is_ids = isinstance(found, list) and all(type(token) is int for token in found)
    if not isinstance(found, str) and not is_ids:
        raise RecipeError(f"{key}: {where}", line[:60], "an object with `text` or `prompt`, text or token ids", _TODO)
    assert isinstance(found, str | list)
    return found
