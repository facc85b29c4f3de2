# SPDX-License-Identifier: Apache-2.0
"""A draft that reads features, in numpy, for EAGLE, EAGLE-3 and MTP over the mock target.

A feature is the number of a text: of the target's contexts, or below 0 of the draft's own texts. So a draft that is
given the feature of another position continues another text.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from speccompile.core.specs import (
    FEATURE_NODES,
    FEATURES,
    HIDDEN,
    LENGTHS,
    NEXT_FEATURES,
    SCORED_NODES,
    TOKENS,
    TREE_MASK,
    GraphSpec,
    TensorSpec,
    hidden_name,
)
from tests.mock_lm import FakeEngine, MockEngine, MockLM
from tests.speculators.hidden_lm import WIDTH, MockTarget

LAYERS = (0, 1, 2)


class FusedTarget(MockTarget):
    """Gives the states of three layers, all of them the number of the context."""

    def run(self, feeds: Any, first_slot: int = 0) -> Any:
        """See `Engine.run`."""
        outputs = dict(super().run(feeds, first_slot))
        hidden = outputs.pop(HIDDEN)
        return {**outputs, **{hidden_name(layer): hidden for layer in LAYERS}}


class MockFusion(FakeEngine):
    """The fusion: one of the three states."""

    def __init__(self, max_slots: int) -> None:
        states = [TensorSpec(hidden_name(i), ("batch", "nodes", WIDTH), "float32", "states") for i in LAYERS]
        made = TensorSpec(FEATURES, ("batch", "nodes", WIDTH), "float32")
        self.spec, self.max_slots, self.max_rows = GraphSpec("fusion", tuple(states), (made,)), max_slots, 0

    def run(self, feeds: Any, first_slot: int = 0) -> Any:
        """See `Engine.run`."""
        return {FEATURES: np.asarray(feeds[hidden_name(LAYERS[-1])])}

    def reset(self, rows: int = 1) -> None:
        """See `Engine.reset`."""

    def clear_slot(self, slot: int) -> None:
        """See `Engine.clear_slot`."""


class MockFeatureDraft(MockEngine):
    """The draft: the text of a node is its feature's and its token; its own feature is that text's number."""

    def __init__(
        self, model: MockLM, target: MockTarget, max_slots: int, max_seq: int, num_candidates: int = 4
    ) -> None:
        super().__init__(model, "draft", max_slots, max_seq, headroom=9, num_candidates=num_candidates)
        features = TensorSpec(FEATURES, ("batch", "states", WIDTH), "float32", "states")
        following = TensorSpec(NEXT_FEATURES, ("batch", "next_states", WIDTH), "float32")
        self.spec = replace(self.spec, inputs=(features,), outputs=(following, *self.spec.outputs))
        self.target, self.texts = target, [np.zeros(0, np.int64)]

    def run(self, feeds: Any, first_slot: int = 0) -> Any:
        """See `Engine.run`."""
        tokens, features = feeds[TOKENS], np.asarray(feeds[FEATURES])
        batch, nodes = tokens.shape
        scored = feeds.get(SCORED_NODES, np.broadcast_to(np.arange(nodes), (batch, nodes)))
        following = np.zeros((batch, 1 + nodes, WIDTH), np.float32)
        logits = np.zeros((batch, nodes, self.model.vocab), np.float32)
        for b in range(batch):
            self.cache[first_slot + b, feeds[LENGTHS][b] : feeds[LENGTHS][b] + nodes] = tokens[b]
            following[b, 0] = features[b, feeds[FEATURE_NODES][b, 0]]
            for node in range(nodes):
                number = int(features[b, feeds[FEATURE_NODES][b, node], 0])
                before = self.texts[-number] if number < 0 else self.target.contexts[number]
                text = np.append(before, tokens[b, node])
                logits[b, node] = self.model.logits(text)
                self.texts.append(text)
                following[b, 1 + node] = 1 - len(self.texts)
        rows = {name: value for name, value in feeds.items() if name not in (FEATURES, FEATURE_NODES, TREE_MASK)}
        picked = np.take_along_axis(logits, scored[..., None], axis=1)
        return {**self._tail(rows, tokens, picked, None), NEXT_FEATURES: following}
