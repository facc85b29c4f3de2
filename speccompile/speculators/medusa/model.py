# SPDX-License-Identifier: Apache-2.0
"""Medusa heads in torch: residual blocks x + SiLU(W x + b) and an LM head each.

Head i reads the final-normed state that gives the root, and drafts the token i + 1 positions after the root. After Cai
et al. 2024, "Medusa" (arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from speccompile.export.attention import gather_nodes
from speccompile.export.candidates import top_tokens
from speccompile.speculators.medusa.config import HeadsSizes

RANDOM_SEED = 0


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x + SiLU(W x + b): [..., hidden] -> the same."""
        return x + functional.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """One stack per head; the names of its state_dict are the published ones, `{head}.{layer}...`."""

    def __init__(self, sizes: HeadsSizes) -> None:
        super().__init__()
        self.sizes = sizes
        for _ in range(sizes.num_drafts or sizes.num_heads):
            stack: list[nn.Module] = [ResidualBlock(sizes.hidden_size) for _ in range(sizes.num_layers)]
            if not sizes.uses_target_lm_head:
                stack.append(nn.Linear(sizes.hidden_size, sizes.draft_vocab_size or sizes.vocab_size, bias=False))
            self.append(nn.ModuleList(stack))

    def states(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Returns what the LM head of each head reads: hidden [..., hidden] -> the same."""
        states = []
        for stack in self:
            state = hidden
            for block in list(stack)[: self.sizes.num_layers]:
                state = block(state)
            states.append(state)
        return states

    def projections(self, target_lm_head: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns [vocab, hidden] of each head: its own, or the target's for all."""
        if self.sizes.uses_target_lm_head:
            assert target_lm_head is not None
            return (target_lm_head,) * len(self)
        return tuple(stack[self.sizes.num_layers].weight for stack in self)

    def forward(self, hidden: torch.Tensor, target_lm_head: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the logits of all heads: hidden [batch, hidden] -> [batch, heads, vocab]."""
        projections = self.projections(target_lm_head)
        states = self.states(hidden)
        return torch.stack([state @ weight.T for state, weight in zip(states, projections, strict=True)], dim=1)


class MedusaDrafter(nn.Module):
    """Inputs and outputs as in `candidate_heads_spec`. `target_lm_head`: [draft_vocab, hidden], if all end in it."""

    def __init__(
        self,
        heads: MedusaHeads,
        num_candidates: int,
        target_lm_head: torch.Tensor | None,
        target_tokens: torch.Tensor | None,  # [draft_vocab] int64; None where the vocabularies are one
    ) -> None:
        super().__init__()
        self.heads, self.num_candidates, self.target_tokens = heads, num_candidates, target_tokens
        self.lm_head = None if target_lm_head is None else nn.Parameter(target_lm_head.float(), requires_grad=False)

    def forward(self, hidden: torch.Tensor, start_nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns one row of candidates per head."""
        state = gather_nodes(hidden, start_nodes[:, None])
        states = self.heads.states(state)  # [batch, 1, hidden] each
        if self.lm_head is not None:
            logits = functional.linear(torch.cat(states, 1), self.lm_head)
        else:
            pairs = zip(states, self.heads.projections(), strict=True)
            logits = torch.cat([functional.linear(state, weight) for state, weight in pairs], 1)
        candidates, probs = top_tokens(logits, self.num_candidates)
        return candidates if self.target_tokens is None else self.target_tokens[candidates], probs


def make_heads(sizes: HeadsSizes, weights: Mapping[str, torch.Tensor] | None) -> MedusaHeads:
    """Returns the heads in float32; `weights` by canonical name, None: random ones, the same every time."""
    with torch.device("meta"):
        heads = MedusaHeads(sizes)
    if weights is None:
        heads.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(RANDOM_SEED)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_(0, sizes.hidden_size**-0.5, generator=generator)
    else:
        names = heads.state_dict()
        parameters = {name: nn.Parameter(weights[name].to(torch.float32), requires_grad=False) for name in names}
        heads.load_state_dict(parameters, assign=True)
    return heads
