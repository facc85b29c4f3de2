# SPDX-License-Identifier: Apache-2.0
"""The prompts of checks: those that are given, else short texts of our own, else ids spread over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from speccompile.errors import RuntimeFault
from speccompile.runtime.spec_engine import SpecEngine

TEXTS = (
    "def read_lines(path):\n    with open(path) as handle:\n        return [line.strip() for line in handle]\n\n\ndef ",
    "The river runs from the hills to the sea. In spring it carries meltwater, and in summer",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    '{"name": "anvil", "price": 12, "tags": ["iron", "heavy"]}\n{"name": "bolt", "price":',
    "Question: A train leaves at nine and arrives at eleven. How long does it take?\nAnswer:",
    "import json\nimport sys\n\n\ndef main(argv):\n    if len(argv) < 2:\n        ",
    "1, 2, 4, 8, 16, 32,",
    "for number in range(10):\n    for other in range(10):\n        print(number, other)\n\nfor ",
)
MOST_TOKENS = 48  # of a text of ours


def find_prompts(engine: SpecEngine, given: Sequence[str | Sequence[int]] | None = None) -> list[list[int]]:
    """Returns prompts as token ids, at least two tokens each, and of long ones the last third of a context.

    Args:
        given: texts or token ids; None: `TEXTS`, or ids where the bundle has no tokenizer.
    """
    third = max(2, engine.context.max_seq_len // 3)
    most = min(MOST_TOKENS, third)
    if given is not None:
        encoded = [engine.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in given]
        for number, ids in enumerate(encoded, 1):
            if len(ids) < 2:
                got = "1 token" if ids else "0 tokens"
                raise RuntimeFault(f"prompt {number}", got, "at least 2 tokens", "Make it longer, or leave it out.")
        encoded, most = [ids[-third:] for ids in encoded], third
    elif engine.tokenizer is not None:
        encoded = [engine.encode(text) for text in TEXTS]
    else:
        encoded = []
    prompts = [ids[:most] for ids in encoded if len(ids) >= 2]
    return prompts or spread_ids(engine.verifier.engine.spec.vocab_size, most)


def spread_ids(vocab_size: int, most: int = MOST_TOKENS) -> list[list[int]]:
    """Returns a prompt for each of `TEXTS`, of ids that are spread over a vocabulary and repeat."""
    length = min(8, most)
    return [[(index * 7 + k * k) % vocab_size for k in range(length)] for index in range(len(TEXTS))]
