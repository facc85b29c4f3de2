# SPDX-License-Identifier: Apache-2.0
"""Drafters of one run: a chain of drawn tokens, or a tree of the likeliest ones, all nodes of a depth at once.

A fixed shape is compiled in. A grown one extends the most probable paths at each depth (EAGLE-2, Li et al. 2024), and
the host prunes nodes without expected gain.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from speccompile.core.tree_shape import TreeShape
from speccompile.export.attention import gather_nodes
from speccompile.export.candidates import sample_token, top_tokens
from speccompile.graph_kinds.heads import DraftForm

Above: TypeAlias = tuple[int, ...] | torch.Tensor


class Expander(Protocol):
    """Heads that draft after several nodes of a tree at once."""

    def begin(self, hidden: torch.Tensor) -> Any:
        """Returns the state before the root, from hidden [batch, 1, target hidden]."""
        ...

    def expand(self, depth: int, state: Any, tokens: torch.Tensor, above: Above) -> tuple[Any, torch.Tensor]:
        """Reads the nodes of a depth (the root's is 0); returns the state, and logits [batch, nodes, vocab].

        Args:
            tokens: [batch, nodes] int64.
            above: their parents among the nodes read at the depth before: numbers where they are equal in every slot,
                else [batch, nodes] int64. The state of `begin` counts as one node.
        """
        ...


def take(x: torch.Tensor, above: Above) -> torch.Tensor:
    """Returns the rows of `x` [batch, nodes, width] at `above`, see `Expander`."""
    if isinstance(above, torch.Tensor):
        return gather_nodes(x, above)
    return x if above == tuple(range(x.shape[1])) else x.index_select(1, torch.tensor(above))


def drafter_from_form(heads: Expander, form: DraftForm) -> nn.Module:
    """Returns the module to trace, in evaluation mode."""
    if form.choices:
        return FixedTree(heads, form.shape).eval()
    if form.width:
        return GrownTree(heads, form.depth, form.width, form.num_candidates).eval()
    return Chain(heads, form.depth).eval()


class Chain(nn.Module):
    """Inputs as in `heads_spec`; outputs tokens, confidences and the distribution of each draft."""

    def __init__(self, heads: Expander, num_drafts: int) -> None:
        super().__init__()
        self.heads, self.num_drafts = heads, num_drafts

    def forward(
        self,
        hidden: torch.Tensor,
        start_nodes: torch.Tensor,
        tokens: torch.Tensor,
        uniforms: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Returns one chain per slot."""
        state = self.heads.begin(gather_nodes(hidden, start_nodes[:, None]))
        drafted, sure, dists = [], [], []
        for depth in range(self.num_drafts):
            state, logits = self.heads.expand(depth, state, tokens, (0,))
            token, confidence, dist = sample_token(logits, uniforms[:, depth], temperature, top_k, top_p)
            tokens = token[:, None]
            drafted.append(tokens)
            sure.append(confidence[:, None])
            dists.append(dist)
        return (torch.cat(drafted, 1), torch.cat(sure, 1), *dists)


class FixedTree(nn.Module):
    """Inputs and outputs as in `tree_heads_spec`, the drafts in the order of the shape."""

    def __init__(self, heads: Expander, shape: TreeShape) -> None:
        super().__init__()
        self.heads, self.shape = heads, shape

    def forward(
        self, hidden: torch.Tensor, start_nodes: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns one tree per slot."""
        state = self.heads.begin(gather_nodes(hidden, start_nodes[:, None]))
        drafted, sure = [], []
        inner: list[tuple[int, ...]] = [()]  # rank paths of the nodes that are read, in order
        above: tuple[int, ...] = (0,)
        for depth in range(self.shape.max_depth):
            state, logits = self.heads.expand(depth, state, tokens, above)
            level = [path for path in self.shape.choices if len(path) == depth + 1]
            num_candidates = 1 + max(path[-1] for path in level)
            candidates, probs = top_tokens(logits, num_candidates)
            node_of = {path: node for node, path in enumerate(inner)}
            picked = torch.tensor([node_of[path[:-1]] * num_candidates + path[-1] for path in level])
            made = candidates.flatten(1).index_select(1, picked)
            drafted.append(made)
            sure.append(probs.flatten(1).index_select(1, picked))
            parents = {path[:-1] for path in self.shape.choices}
            inner = [path for path in level if path in parents]
            if inner:
                tokens = made.index_select(1, torch.tensor([level.index(path) for path in inner]))
                above = tuple(node_of[path[:-1]] for path in inner)
        return torch.cat(drafted, 1), torch.cat(sure, 1)


class GrownTree(nn.Module):
    """Inputs and outputs as in `tree_heads_spec` with parents; `grown_drafts` says how many drafts there are."""

    def __init__(self, heads: Expander, depth: int, width: int, num_candidates: int) -> None:
        super().__init__()
        self.heads, self.depth, self.width, self.num_candidates = heads, depth, width, num_candidates

    def forward(
        self, hidden: torch.Tensor, start_nodes: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns one tree per slot."""
        state = self.heads.begin(gather_nodes(hidden, start_nodes[:, None]))
        drafted, sure, parents = [], [], []
        above: Above = (0,)
        number = torch.zeros_like(tokens)  # of the nodes that are read
        paths, num_made = torch.ones_like(tokens, dtype=torch.float32), 0
        for depth in range(self.depth):
            state, logits = self.heads.expand(depth, state, tokens, above)
            candidates, probs = top_tokens(logits, self.num_candidates)
            made = candidates.flatten(1)
            drafted.append(made)
            sure.append(probs.flatten(1))
            repeated = torch.arange(logits.shape[1]).repeat_interleave(self.num_candidates)
            parents.append(number.index_select(1, repeated))
            if depth + 1 < self.depth:
                paths = (paths[:, :, None] * probs).flatten(1)
                paths, best = paths.topk(min(self.width, made.shape[1]), dim=1)
                tokens, above = made.gather(1, best), repeated[best]
                number, num_made = best + (num_made + 1), num_made + made.shape[1]
        return torch.cat(drafted, 1), torch.cat(sure, 1), torch.cat(parents, 1)
