# SPDX-License-Identifier: Apache-2.0
"""The bundle's tokenizer against the one of the target's checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speccompile.certificate.prompts import TEXTS
from speccompile.certificate.results import Check, check_of, not_run
from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.errors import BundleError
from speccompile.runtime.spec_engine import SpecEngine

TOKENIZER, FILE = "tokenizer", "tokenizer.json"
ODD_TEXTS = ("", " ", "naïve café, 数字 12 345,67", "\t\tx = [1, 2]\r\n", "🙂🙃", "<s></s>")
LONG_TEXT = "\n".join(TEXTS) * 200  # some 40,000 tokens: more than a stored truncation leaves


def check_tokenizer(engine: SpecEngine, checkpoint: Path | None) -> Check:
    """Compares vocabulary and ids of texts with the checkpoint's tokenizer, and the ids with the target's vocabulary.

    Ids are compared with those that transformers gives, where it is installed and can read the tokenizer.

    Args:
        checkpoint: the target's folder; None: it is not at hand.
    """
    if engine.tokenizer is None:
        return not_run(TOKENIZER, "the bundle has no tokenizer")
    size = engine.verifier.engine.spec.vocab_size
    texts = [*TEXTS, *ODD_TEXTS, LONG_TEXT]
    ids = [engine.tokenizer.encode(text).ids for text in texts]
    largest = max((token for row in ids for token in row), default=0)
    facts: dict[str, Any] = {"num_texts": len(texts), "largest_id": largest, "vocab_size": size}
    if largest >= size:
        summary = f"the tokenizer gives id {largest}, the target has {size} tokens"
        return check_of(TOKENIZER, False, summary, facts)
    if checkpoint is None or not (checkpoint / FILE).is_file():
        return not_run(TOKENIZER, "ids are tokens of the target, but the checkpoint's tokenizer is not at hand")
    other: Any = load_tokenizer(checkpoint / FILE, BundleError, "Give the target's checkpoint.")
    expected = _ids_of_transformers(checkpoint, texts)
    reader = "tokenizers" if expected is None else "transformers"
    expected = [other.encode(text).ids for text in texts] if expected is None else expected
    differing = [i for i, row in enumerate(expected) if row != ids[i]]
    ours, theirs = engine.tokenizer.get_vocab(), other.get_vocab()
    num_moved = sum(theirs.get(token) != index for token, index in ours.items()) + len(theirs.keys() - ours.keys())
    facts |= {"num_equal": len(texts) - len(differing), "reader": reader}
    facts |= {"num_entries": len(ours), "num_entries_differing": num_moved}
    is_right = not differing and not num_moved
    told = f"{len(texts) - len(differing)} of {len(texts)} texts have the ids of the checkpoint's tokenizer in {reader}"
    summary = f"{told}; {num_moved} of {len(ours)} entries of the vocabulary differ"
    return check_of(TOKENIZER, is_right, summary, facts)


def _ids_of_transformers(checkpoint: Path, texts: Sequence[str]) -> list[list[int]] | None:
    """Returns the ids that transformers gives; None: it is not installed, or does not read this tokenizer."""
    try:
        from transformers import PreTrainedTokenizerFast

        reader = PreTrainedTokenizerFast.from_pretrained(checkpoint, local_files_only=True)
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return [list(reader(text, verbose=False)["input_ids"]) for text in texts]
