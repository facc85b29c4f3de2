# SPDX-License-Identifier: Apache-2.0
"""Texts that a recipe names, as token ids. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.errors import CheckpointError, RecipeError

TOKENIZER = "tokenizer.json"
Texts = tuple[tuple[int, ...], ...]
_FIELDS = ("text", "prompt")
MESSAGES = "messages"
_TODO = 'Give a text file, or lines like {"prompt": "..."}.'


@dataclass(frozen=True)
class TextSample:
    """Text over which a target's quantised weights are chosen, and their distance to float32 is measured.

    Args:
        texts: token ids, as they are; half of them for each purpose. Empty: the target answers `prompts`.
        prompts: token ids of conversations, half of them for each purpose; empty: it begins with single tokens.
        weights: how those of 4 bits are made: compensated over the text, rounded, or as for drafts that share them.
    """

    texts: Texts = ()
    prompts: Texts = ()
    stop_ids: tuple[int, ...] = ()
    source: str = "drawn from the target"
    weights: Literal["compensated", "rounded", "as drafts"] = "compensated"


def tokens_from_file(
    key: str,
    path: Path,
    folder: Path,
    vocab_size: int,
    bounds: tuple[int, int],
    short: str = "Give more text.",
    chat: Callable[[Any, list[Any], str], list[int]] | None = None,
) -> Texts:
    """Returns the first tokens of a file as texts.

    Args:
        path: JSON lines (.jsonl) with `text` or `prompt`, a text or token ids, or with `messages`; any other file is
            one text.
        bounds: tokens that it must have, and how many are read.
        chat: returns the token ids of messages, given the tokenizer and where they stand; None: there may be none.

    Raises:
        RecipeError: it cannot be read, a line is wrong, or it has too few tokens.
    """
    tokenizer = load_tokenizer(folder / TOKENIZER, CheckpointError, "Download the file again.")
    texts: list[tuple[int, ...]] = []
    least, left = bounds
    for where, text in _texts(key, path, () if chat is None else (MESSAGES,)):
        ids = text
        if isinstance(text, str):
            ids = tokenizer.encode(text).ids
        elif chat is not None and text and not isinstance(text[0], int):
            ids = chat(tokenizer, text, where)
        if wrong := [token for token in ids if not 0 <= token < vocab_size]:
            raise RecipeError(f"{key}: {where}", f"token {wrong[0]}", f"ids below {vocab_size}", _TODO)
        texts.append(tuple(ids[:left]))
        left -= len(texts[-1])
        if left == 0:
            break
    if bounds[1] - left < least:
        raise RecipeError(f"{key}: {path}", f"{bounds[1] - left} tokens", f"at least {least}", short)
    return tuple(text for text in texts if text)


def _texts(key: str, path: Path, more: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as fault:
        raise RecipeError(f"{key}: {path}", str(fault), "a readable file of UTF-8 text", "Check the file.") from fault
    if path.suffix != ".jsonl":
        yield str(path), content
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield f"{path}:{number}", _text_of_line(key, f"{path}:{number}", line, more)


def _text_of_line(key: str, where: str, line: str, more: tuple[str, ...]) -> str | list[Any]:
    try:
        data = json.loads(line)
    except ValueError as fault:
        raise RecipeError(f"{key}: {where}", str(fault), "one JSON object", _TODO) from fault
    found: Any = None
    if isinstance(data, dict):
        found = next((data[name] for name in (*more, *_FIELDS) if name in data), None)
        if more and MESSAGES in data:
            if isinstance(found, list) and found and not isinstance(found[0], int):
                return found
            found = None
    is_ids = isinstance(found, list) and all(type(token) is int for token in found)
    if not isinstance(found, str) and not is_ids:
        expected = "an object with `text` or `prompt`, text or token ids" + ", or with `messages`" * bool(more)
        raise RecipeError(f"{key}: {where}", line[:60], expected, _TODO)
    assert isinstance(found, str | list)
    return found
