# SPDX-License-Identifier: Apache-2.0
"""A loaded bundle without files: the mock language model as target and draft, with planted defects."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from speccompile.core.specs import TOKENS
from speccompile.errors import RuntimeFault
from speccompile.runtime.spec_engine import SpecEngine
from tests.lab.engines import mock_engine
from tests.mock_lm import VOCAB, MockEngine, MockLM

TARGET = MockLM(seed=21)
SLOTS, MAX_SEQ, NODES = 3, 64, 8
PROMPTS = [[3, 1, 4, 1, 5], [2, 7], [9, 9, 8, 2, 6, 5], [1, 2, 3]]


class StrictEngine(MockEngine):
    """Refuses ids that are no tokens, as an embedding does; shows its cache."""

    def run(self, feeds: Mapping[str, np.ndarray], first_slot: int = 0) -> Any:
        tokens = feeds[TOKENS]
        if tokens.min() < 0 or tokens.max() >= VOCAB:
            raise RuntimeFault("engine target", "an index out of bounds", "tokens", "")
        return super().run(feeds, first_slot)

    def read_caches(self, slot: int, rows: int) -> dict[str, np.ndarray]:
        return {"k_cache.0": self.cache[slot, None, :rows, None].astype(np.float32)}


class StaleRow(StrictEngine):
    """Moves all rows of an accepted path but its last one."""

    def compact(self, lengths: np.ndarray, path: np.ndarray) -> None:
        kept = path.copy()
        for row in kept:
            num = int((row >= 0).sum())
            if num > 1:
                row[num - 1] = num - 1  # where it already lies
        super().compact(lengths, kept)


class WrongFollower(StrictEngine):
    """Gives another token than the target's own after three accepted drafts."""

    def _tail(self, feeds: Any, tokens: Any, logits: Any, scored: Any) -> Any:
        outputs = super()._tail(feeds, tokens, logits, scored)
        is_long = outputs["num_accepted"] >= 3
        outputs["next_token"] = np.where(is_long, (outputs["next_token"] + 1) % VOCAB, outputs["next_token"])
        return outputs


def make_engine(kind: type[MockEngine] = StrictEngine, tree: str = "chain", nodes: int = NODES) -> SpecEngine:
    """Returns an engine whose target is of a kind."""
    target = kind(TARGET, "target", SLOTS, MAX_SEQ, headroom=nodes + 1)
    fields: dict[str, Any] = {"num_draft_tokens": 3} if tree == "chain" else {"tree": tree}
    sizes: dict[str, Any] = {
        "slots": SLOTS,
        "max_seq": MAX_SEQ,
        "nodes": nodes,
        "headroom": nodes + 1,
        "tokenizer": None,
    }
    return mock_engine(target, TARGET.blurred(22, 0.7), "draft_model", **sizes, candidates=8, **fields)
