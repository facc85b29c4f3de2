# SPDX-License-Identifier: Apache-2.0
"""Texts of a target: those of a sample that is given, else its own answers to the sample's prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from speccompile.backends.base import LoadJob
from speccompile.backends.onnxruntime.kernel_library import find_library
from speccompile.checkpoints.texts import TextSample
from speccompile.core import specs
from speccompile.core.specs import GraphSpec, all_sure

if TYPE_CHECKING:
    from speccompile.backends.onnxruntime.engine import OrtEngine

NUM_SLOTS = 20  # texts that are drawn side by side: four of each kind of conversation
NUM_NEW = 112  # tokens of an answer at most: with 20 of them 2240 positions
PIECE = 256  # tokens of a given text that count as one, half of which choose weights while the others measure them
ROUNDS = 4  # how often prompts are answered at most, where the answers are short
# Of prompts that stand for a user's the answers are drawn as a user draws them; single tokens have no such use.
TEMPERATURES = {True: 0.8, False: 1.0}
_PREPACKED_BYTES = 2 << 30  # of a graph whose weights may be copied into the layout of products; others stay mapped


@dataclass(frozen=True)
class Text:
    """A text whose tokens from `start` on are of interest."""

    tokens: tuple[int, ...]
    start: int = 1  # 1 or more: the first token that is predicted from those before


def open_reader(path: Path, spec: GraphSpec, max_slots: int, max_rows: int) -> OrtEngine:
    """Returns an engine for texts; a packed copy of a large model's weights would not fit beside a build."""
    from speccompile.backends.onnxruntime.engine import load_engine

    num_bytes = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
    settings = {"threads": 0, "prepack": num_bytes <= _PREPACKED_BYTES}
    return load_engine(LoadJob(path, spec, max_slots, max_rows, settings))


def piece_length() -> int:
    """Returns how many tokens of a text are read at once: without our kernels each copies its experts' weights."""
    return 16 if find_library() is None else NUM_NEW


def texts_of(path: Path, spec: GraphSpec, sample: TextSample, num_tokens: int, *, measures: bool) -> list[Text]:
    """Returns texts with `num_tokens` tokens of interest, or more, or fewer where the sample has fewer.

    Args:
        measures: which half of the sample: that with which forms are compared, or that over which weights are chosen.
    """
    if sample.texts:
        length = min(PIECE, spec.max_rows or PIECE)
        pieces = [text[at : at + length] for text in sample.texts for at in range(0, len(text), length)]
        return _enough((Text(piece) for piece in _half(pieces, measures) if len(piece) > 1), num_tokens)
    room = spec.max_rows // 2 if spec.max_rows else NUM_NEW
    prompts = [prompt for prompt in _half(sample.prompts, measures) if len(prompt) <= max(room, 1)] if room else []
    is_chat = bool(prompts)
    if not is_chat:  # first tokens that lie as far apart as possible in the vocabulary
        first = range(0, spec.vocab_size, max(spec.vocab_size // (2 * NUM_SLOTS), 1))
        prompts = [(token,) for token in _half(first, measures)]
    drawn = _draw(path, spec, prompts, sample.stop_ids if is_chat else (), TEMPERATURES[is_chat], int(measures))
    return _enough(drawn, num_tokens)


def _half(rows: Sequence[Any], measures: bool) -> list[Any]:
    return list(rows if len(rows) < 2 else rows[0 if measures else 1 :: 2])


def _enough(texts: Iterator[Text], num_tokens: int) -> list[Text]:
    found = []
    for text in texts:
        found.append(text)
        num_tokens -= len(text.tokens) - text.start
        if num_tokens <= 0:
            break
    return found


def _draw(
    path: Path,
    spec: GraphSpec,
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
    temperature: float,
    seed: int,
) -> Iterator[Text]:
    """Yields answers of the target to the prompts, `NUM_SLOTS` drawn side by side, `ROUNDS` times all."""
    rows = max(map(len, prompts)) + NUM_NEW
    rows = min(rows, spec.max_rows or rows)
    engine = open_reader(path, spec, NUM_SLOTS, rows)
    rng = np.random.default_rng(seed)
    for _ in range(ROUNDS):
        for at in range(0, len(prompts), NUM_SLOTS):
            group = prompts[at : at + NUM_SLOTS]
            engine.reset(rows)
            for slot, prompt in enumerate(group):
                read(engine, spec, prompt[:-1], slot)
            lengths = np.array([len(prompt) - 1 for prompt in group], np.int64)
            texts = [list(prompt) for prompt in group]
            is_open = np.full(len(group), True)
            while is_open.any():
                feeds: dict[str, NDArray[Any]] = {
                    specs.TOKENS: np.array([[text[-1]] for text in texts], np.int64),
                    specs.LENGTHS: lengths,
                    specs.TEMPERATURE: np.full(len(group), temperature, np.float32),
                    specs.UNIFORMS: rng.random((len(group), 1, 2), dtype=np.float32),
                    **all_sure(spec, len(group), 1),
                }
                tokens = engine.run(feeds)[specs.NEXT_TOKEN]
                for slot in np.flatnonzero(is_open).tolist():
                    text, token = texts[slot], int(tokens[slot])
                    text.append(token)
                    is_full = len(text) - len(group[slot]) >= NUM_NEW or len(text) >= rows
                    is_open[slot] = not (token in stop_ids or is_full)
                lengths = np.minimum(lengths + 1, rows - 1)  # slots whose text has ended write over their last row
            yield from (Text(tuple(text), len(prompt)) for text, prompt in zip(texts, group, strict=True))


def read(engine: OrtEngine, spec: GraphSpec, tokens: Sequence[int], slot: int = 0) -> None:
    """Writes the caches of a slot for the first tokens of a text; nothing is scored but the last node of a piece."""
    piece = piece_length()
    for at in range(0, len(tokens), piece):
        part = np.array([tokens[at : at + piece]], np.int64)
        last = np.array([[part.shape[1] - 1]], np.int64)
        feeds = {specs.TOKENS: part, specs.LENGTHS: np.array([at], np.int64), specs.SCORED_NODES: last}
        engine.run({**feeds, **all_sure(spec, 1, part.shape[1])}, slot)
