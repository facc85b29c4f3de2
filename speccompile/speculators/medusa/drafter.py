# SPDX-License-Identifier: Apache-2.0
"""The module of Medusa heads that is traced, and how its weights are made or read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from speccompile.export.attention import gather_nodes
from speccompile.export.guessing import top_tokens
from speccompile.speculators.medusa.heads import HeadsSizes, MedusaHeads
from speccompile.speculators.medusa.sizes import GraphSizes

RANDOM_SEED = 0


class MedusaDrafter(nn.Module):
    """Inputs and outputs as in `guessing_heads_spec`.

    Args:
        heads: those in the graph.
        num_guesses: tokens of each.
        target_lm_head: [vocab, hidden], where the heads end in it.
    """

    def __init__(self, heads: MedusaHeads, num_guesses: int, target_lm_head: torch.Tensor | None) -> None:
        super().__init__()
        self.heads, self.num_guesses = heads, num_guesses
        self.lm_head = None if target_lm_head is None else nn.Parameter(target_lm_head, requires_grad=False)

    def forward(self, hidden: torch.Tensor, start_nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One row of guesses a head."""
        state = gather_nodes(hidden, start_nodes[:, None])
        if self.lm_head is not None:
            states = self.heads.states(state)[:, 0]  # [batch, heads, hidden]
            return top_tokens(functional.linear(states, self.lm_head), self.num_guesses)
        states = self.heads.states(state)  # [batch, 1, heads, hidden]
        logits = [functional.linear(states[:, :, i], weight) for i, weight in enumerate(self.heads.projections())]
        return top_tokens(torch.cat(logits, 1), self.num_guesses)


def make_drafter(
    sizes: GraphSizes, weights: Mapping[str, torch.Tensor] | None, target_lm_head: torch.Tensor | None
) -> MedusaDrafter:
    """The drafter in float32.

    Args:
        sizes: of the graph.
        weights: by the names of our layout; None: random ones, the same every time.
        target_lm_head: see `MedusaDrafter`.
    """
    own = HeadsSizes(sizes.hidden_size, sizes.vocab_size, sizes.num_drafts, sizes.num_layers, sizes.uses_target_lm_head)
    with torch.device("meta"):
        heads = MedusaHeads(own)
    if weights is None:
        heads.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(RANDOM_SEED)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_(0, sizes.hidden_size**-0.5, generator=generator)
    else:
        wanted = heads.state_dict()
        held = {name: nn.Parameter(weights[name].to(torch.float32), requires_grad=False) for name in wanted}
        heads.load_state_dict(held, assign=True)
    return MedusaDrafter(heads, sizes.num_guesses, target_lm_head).eval()
