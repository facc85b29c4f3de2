# SPDX-License-Identifier: Apache-2.0
"""The bundle's tokenizer against the one of the target's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccompile.certificate.prompts import TEXTS
from speccompile.certificate.results import Check, check_of, not_run
from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.errors import BundleError
from speccompile.runtime.spec_engine import SpecEngine

TOKENIZER, FILE = "tokenizer", "tokenizer.json"
ODD_TEXTS = ("", " ", "naïve café, 数字 12 345,67", "\t\tx = [1, 2]\r\n", "🙂🙃", "<s></s>")


def check_tokenizer(engine: SpecEngine, checkpoint: Path | None) -> Check:
    """Compares vocabulary and ids of texts with the checkpoint's tokenizer, and the ids with the target's vocabulary.

    Args:
        engine: of the bundle.
        checkpoint: the target's folder; None: it is not at hand.
    """
    if engine.tokenizer is None:
        return not_run(TOKENIZER, "the bundle has no tokenizer")
    size = engine.verifier.engine.spec.vocab_size
    texts = [*TEXTS, *ODD_TEXTS]
    ids = [engine.tokenizer.encode(text).ids for text in texts]
    largest = max((token for row in ids for token in row), default=0)
    facts: dict[str, Any] = {"num_texts": len(texts), "largest_id": largest, "vocab_size": size}
    if largest >= size:
        summary = f"the tokenizer gives id {largest}, the target has {size} tokens"
        return check_of(TOKENIZER, False, summary, facts)
    if checkpoint is None or not (checkpoint / FILE).is_file():
        return not_run(TOKENIZER, "ids are tokens of the target, but the checkpoint's tokenizer is not at hand")
    other: Any = load_tokenizer(checkpoint / FILE, BundleError, "Give the target's checkpoint.")
    differing = [i for i, text in enumerate(texts) if other.encode(text).ids != ids[i]]
    ours, theirs = engine.tokenizer.get_vocab(), other.get_vocab()
    num_moved = sum(theirs.get(token) != index for token, index in ours.items()) + len(theirs.keys() - ours.keys())
    facts |= {"num_equal": len(texts) - len(differing), "num_entries": len(ours), "num_entries_differing": num_moved}
    is_right = not differing and not num_moved
    told = f"{len(texts) - len(differing)} of {len(texts)} texts have the ids of the checkpoint's tokenizer"
    summary = f"{told}; {num_moved} of {len(ours)} entries of the vocabulary differ"
    return check_of(TOKENIZER, is_right, summary, facts)
