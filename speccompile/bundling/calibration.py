# SPDX-License-Identifier: Apache-2.0
"""The text over which a target's weights are quantised, as token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speccompile.backends.base import Backend
from speccompile.bundling.tokenizers import TOKENIZER
from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.core import registry
from speccompile.core.jobs import GraphJob
from speccompile.core.protocols import GraphSource
from speccompile.errors import CheckpointError, RecipeError
from speccompile.recipe.models import AUTO_TEXTS, NO_TEXTS
from speccompile.recipe.plan import TARGET, BuildPlan

Texts = tuple[tuple[int, ...], ...]

MAX_TOKENS = 32768  # read of a file: more text takes longer and was not seen to help
MIN_TOKENS = 256
_KEY = "target.calibration"
_FIELDS = ("text", "prompt")
_TODO = 'Give a text file, or lines like {"prompt": "..."}.'


def calibration_of(plan: BuildPlan, job: GraphJob, source: GraphSource, backend: Backend) -> Texts | None:
    """Returns the calibration texts of a graph: empty to draw them from the model; None where weights are rounded.

    Weights are rounded with random weights, in drafts, and in a target whose draft shares its quantised weights.

    Args:
        plan: of the build.
        job: one of its jobs.
        source: of the job, with its checkpoint's folder and sizes.
        backend: that compiles it.

    Raises:
        RecipeError: the file cannot be read, or does not hold enough text.
        CheckpointError: the tokenizer cannot be read.
    """
    if job.name != TARGET or plan.weights != "checkpoint" or job.quantization not in backend.calibrates:
        return None
    if plan.calibration == NO_TEXTS or any(_shares_weights(draft, job) for draft in plan.drafts):
        return None
    if plan.calibration == AUTO_TEXTS:
        return ()
    return read_texts(Path(plan.calibration), source.folder, source.dims.vocab_size)


def _shares_weights(draft: GraphJob, target: GraphJob) -> bool:
    return bool(registry.find_class(draft.source).shares_weights) and draft.quantization == target.quantization


def read_texts(path: Path, folder: Path, vocab_size: int) -> Texts:
    """Returns the first `MAX_TOKENS` tokens of a file as texts.

    Args:
        path: JSON lines (.jsonl) with `text` or `prompt`, a text or token ids; any other file is one text.
        folder: with the target's tokenizer.
        vocab_size: token ids are below.

    Raises:
        RecipeError: it cannot be read, a line is wrong, or it holds fewer than `MIN_TOKENS` tokens.
        CheckpointError: the tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(folder / TOKENIZER, CheckpointError, "Download the file again.")
    texts: list[tuple[int, ...]] = []
    left = MAX_TOKENS
    for where, text in _texts(path):
        ids = tokenizer.encode(text).ids if isinstance(text, str) else text
        if any(not 0 <= token < vocab_size for token in ids):
            raise RecipeError(f"{_KEY}: {where}", f"token {max(ids)}", f"ids below {vocab_size}", _TODO)
        texts.append(tuple(ids[:left]))
        left -= len(texts[-1])
        if left == 0:
            break
    if MAX_TOKENS - left < MIN_TOKENS:
        got = f"{MAX_TOKENS - left} tokens"
        todo = f"Give more text, or {AUTO_TEXTS} to draw it from the model."
        raise RecipeError(f"{_KEY}: {path}", got, f"at least {MIN_TOKENS}", todo)
    return tuple(text for text in texts if text)


def _texts(path: Path) -> Iterator[tuple[str, str | list[int]]]:
    """Yields where a text stands, and the text or its token ids."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as fault:
        raise RecipeError(f"{_KEY}: {path}", str(fault), "a readable file of UTF-8 text", "Check the file.") from fault
    if path.suffix != ".jsonl":
        yield str(path), content
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield f"{path}:{number}", _text_of_line(f"{path}:{number}", line)


def _text_of_line(where: str, line: str) -> str | list[int]:
    try:
        data = json.loads(line)
    except ValueError as fault:
        raise RecipeError(f"{_KEY}: {where}", str(fault), "one JSON object", _TODO) from fault
    found: Any = None
    if isinstance(data, dict):
        found = next((data[key] for key in _FIELDS if key in data), None)
    is_ids = isinstance(found, list) and all(type(token) is int for token in found)
    if not isinstance(found, str) and not is_ids:
        raise RecipeError(f"{_KEY}: {where}", line[:60], "an object with `text` or `prompt`, text or token ids", _TODO)
    assert isinstance(found, str | list)
    return found
