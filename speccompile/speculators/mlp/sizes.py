# SPDX-License-Identifier: Apache-2.0
"""Sizes of an MLP speculator, and the weights that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from speccompile.core.jobs import WeightCounts
from speccompile.core.specs import GraphSpec
from speccompile.graph_kinds.heads import heads_spec

MODEL_TYPE = "mlp_speculator"
# (template, dims of all heads but the first of the projections, the first head of those that may share it)
WEIGHTS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("emb.{}.weight", ("vocab", "inner"), 0),
    ("proj.{}.weight", ("inner", "inner"), 1),
    ("head.{}.weight", ("vocab", "inner"), 0),
    ("ln.{}.weight", ("inner",), 0),
    ("ln.{}.bias", ("inner",), 0),
)


@dataclass(frozen=True)
class HeadsSizes:
    """Sizes and switches of a speculator."""

    model_type: str
    vocab_size: int
    hidden_size: int
    inner_size: int  # of the heads' own state (`inner_dim`)
    num_heads: int  # heads in the checkpoint (`n_predict`); the state's weight depends on it
    num_drafts: int
    is_tied: bool  # heads share embedding, LM head and norm; projections from the second on are one
    scales_input: bool  # the target's state is normalised first
    num_params: int = 0

    def spec(self, name: str) -> GraphSpec:
        return heads_spec(name, self.hidden_size, self.vocab_size, self.num_drafts)

    def weights(self) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """Yields (kind, head, shape) of every weight of all heads, shared ones included."""
        known = {"vocab": self.vocab_size, "inner": self.inner_size}
        for head in range(self.num_heads):
            for kind, dims, first in WEIGHTS:
                shape = tuple(known[d] for d in dims)
                yield kind, head, shape if head >= first else (self.inner_size, self.hidden_size)

    def shares(self, kind: str, head: int) -> int:
        """Returns the head whose weight of that kind `head` uses."""
        first = 1 if kind.startswith("proj") else 0
        return first if self.is_tied and head > first else head

    def counts(self) -> WeightCounts:
        """Returns the weights of the graph. An LM head is a linear of its own even where heads share it."""
        used = {(k, self.shares(k, h)): s for k, h, s in self.weights() if h < self.num_drafts}
        sizes = {key: shape[0] * (shape[1] if len(shape) > 1 else 1) for key, shape in used.items()}
        linear = sum(size for (kind, _), size in sizes.items() if kind.startswith(("proj", "head")))
        return WeightCounts(sum(sizes.values()), linear, sum(sizes.values()) - linear)
