# SPDX-License-Identifier: Apache-2.0
"""Chooses the tokens that a draft may name: the most frequent ones of a text. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from speccompile.checkpoints.checkpoint import special_tokens
from speccompile.checkpoints.texts import tokens_from_file
from speccompile.errors import RecipeError
from speccompile.graph_kinds.decoder import DRAFT_VOCAB, DraftVocab

MIN_TOKENS, MAX_TOKENS = 1000, 1 << 22  # of the text
HELD_OUT = 4  # every fourth text, or the last fourth of a single one, is left out where the coverage is estimated


@dataclass(frozen=True)
class DraftTokens:
    """The tokens that a draft may name."""

    ids: tuple[int, ...]
    coverage: float  # share of the text's tokens that are among them
    held_out: float  # the coverage of a fourth of the text, for tokens chosen from the rest

    @property
    def digest(self) -> str:
        """SHA-256 of the ids."""
        return sha256(np.asarray(self.ids, np.int64).tobytes()).hexdigest()

    def record(self) -> dict[str, float]:
        return {"size": len(self.ids), "coverage": round(self.coverage, 4), "held_out": round(self.held_out, 4)}


def choose_tokens(vocab: DraftVocab, folder: Path, vocab_size: int) -> DraftTokens:
    """Returns the tokens that the recipe asks for: the most frequent ones, and those that end a text.

    Args:
        folder: with tokenizer.json and the configs that name the tokens at the end of a text.

    Raises:
        RecipeError: the text cannot be read or is too short, or the vocabulary has no more tokens than are asked for.
    """
    if vocab.size >= vocab_size:
        todo = "Leave it out to draft with the whole vocabulary."
        raise RecipeError(DRAFT_VOCAB, f"{vocab.size}", f"fewer than the {vocab_size} tokens of the draft", todo)
    bounds = (MIN_TOKENS, MAX_TOKENS)
    texts = tokens_from_file("speculator.draft_vocab_text", Path(vocab.text), folder, vocab_size, bounds)
    ends = [token for token in special_tokens(folder)[0] if token < vocab_size]
    return tokens_of(texts, vocab.size, vocab_size, ends)


def tokens_of(texts: Sequence[Sequence[int]], size: int, vocab_size: int, ends: Sequence[int] = ()) -> DraftTokens:
    """Returns the `size` most frequent tokens, those in `ends` first; of equally frequent ones the lower id."""
    kept, held_out = _parts(texts)
    counts = _counts(texts, vocab_size)
    ids = _most_frequent(counts, size, ends)
    others = _most_frequent(_counts(kept, vocab_size), size, ends)
    return DraftTokens(tuple(ids.tolist()), _share(counts, ids), _share(_counts(held_out, vocab_size), others))


def _parts(texts: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    if len(texts) >= HELD_OUT:
        kept = [text for i, text in enumerate(texts) if i % HELD_OUT != HELD_OUT - 1]
        return kept, list(texts[HELD_OUT - 1 :: HELD_OUT])
    cuts = [len(text) * (HELD_OUT - 1) // HELD_OUT for text in texts]
    return [t[:c] for t, c in zip(texts, cuts, strict=True)], [t[c:] for t, c in zip(texts, cuts, strict=True)]


def _counts(texts: Iterable[Sequence[int]], vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(np.asarray(text, np.int64), minlength=vocab_size)
    return counts


def _most_frequent(counts: np.ndarray, size: int, ends: Sequence[int]) -> np.ndarray:
    wanted = counts.copy()
    wanted[list(ends)] = counts.sum() + 1
    return np.sort(np.argsort(-wanted, kind="stable")[:size])


def _share(counts: np.ndarray, ids: np.ndarray) -> float:
    return float(counts[ids].sum() / max(counts.sum(), 1))
