# SPDX-License-Identifier: Apache-2.0
"""Drafting with a Prophet transformer depth by depth, and how its weights are made or read.

Its context is what was read before in the same run, a handful of places: keys and values are kept as they come, and
a node of a tree sees those of its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from speccompile.checkpoints.target_tables import TargetTables
from speccompile.export.tree_drafters import Above, take
from speccompile.speculators.prophet.heads import Prophet, ProphetSizes

RANDOM_SEED = 0
Held = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Seen:
    """The places that are held, and which of them the nodes of the last depth see, themselves included.

    Args:
        held: keys and values of each layer, [batch, kv_heads, places, head_dim].
        rows: for each node the places, where they are the same in every slot; else [batch, nodes, places] float32,
            1 where a place is seen.
    """

    held: Held
    rows: tuple[tuple[int, ...], ...] | torch.Tensor


class ProphetExpander(nn.Module):
    """See `export.tree_drafters.Expander`.

    Args:
        heads: the transformer.
        embeddings: [vocab, hidden].
        lm_head: [vocab, hidden].
    """

    def __init__(self, heads: Prophet, embeddings: torch.Tensor, lm_head: torch.Tensor) -> None:
        super().__init__()
        self.heads = heads
        self.embeddings = nn.Parameter(embeddings, requires_grad=False)
        self.lm_head = self.embeddings if lm_head is embeddings else nn.Parameter(lm_head, requires_grad=False)

    def begin(self, hidden: torch.Tensor) -> Seen:
        """The target's state is the first place."""
        return Seen(self.heads.begin(hidden[:, 0]), ((0,),))

    def expand(self, depth: int, state: Seen, tokens: torch.Tensor, above: Above) -> tuple[Seen, torch.Tensor]:
        """One position: that of the depth."""
        rows, mask = _see(state, tokens, above)
        x = functional.embedding(tokens, self.embeddings)
        positions, grown = torch.full((1, 1), depth + 1, dtype=torch.int64), []
        for layer, past in zip(self.heads.layers, state.held, strict=True):
            x, kept = layer(x, positions, past, mask)
            grown.append(kept)
        return Seen(grown, rows), functional.linear(self.heads.norm(x), self.lm_head)


def _see(
    state: Seen, tokens: torch.Tensor, above: Above
) -> tuple[tuple[tuple[int, ...], ...] | torch.Tensor, torch.Tensor | None]:
    """The places that new nodes see; and the mask over all of them, None where each sees every place."""
    places, nodes = state.held[0][0].shape[2], tokens.shape[1]
    if not isinstance(above, torch.Tensor):
        assert not isinstance(state.rows, torch.Tensor)
        rows = tuple((*state.rows[parent], places + node) for node, parent in enumerate(above))
        if all(len(row) == places + nodes for row in rows):
            return rows, None
        return rows, torch.tensor([[place in row for place in range(places + nodes)] for row in rows])
    if isinstance(state.rows, torch.Tensor):
        before = take(state.rows, above)
    else:
        known = torch.tensor([[float(place in row) for place in range(places)] for row in state.rows])
        before = known[above]
    own = torch.eye(nodes).expand(tokens.shape[0], nodes, nodes)
    seen = torch.cat((before, own), 2)
    return seen, (seen > 0.5)[:, None]


def make_expander(
    sizes: ProphetSizes, weights: Mapping[str, torch.Tensor] | None, tables: TargetTables | None
) -> ProphetExpander:
    """The drafter in float32.

    Args:
        sizes: of the transformer.
        weights: by the names of our layout; None: random ones, the same every time.
        tables: the target's, where it has none of its own.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        heads = Prophet(sizes)
    if weights is not None:
        held = {k: nn.Parameter(weights[k].to(torch.float32), requires_grad=False) for k in heads.state_dict()}
        heads.load_state_dict(held, assign=True)
    heads.requires_grad_(False)
    if sizes.uses_target_embeddings:
        assert tables is not None
        return ProphetExpander(heads, tables.embeddings, tables.lm_head).eval()
    embeddings = heads.embed_tokens.weight
    lm_head = embeddings if sizes.tie_word_embeddings else heads.lm_head.weight
    return ProphetExpander(heads, embeddings, lm_head).eval()
