# SPDX-License-Identifier: Apache-2.0
"""The heads in torch, and how drafts are made of them depth by depth.

Head i reads the state s (first the target's final-normed state of the last accepted position) and the token t before:

    s <- gelu(ln_i(proj_i s + (e / w) emb_i[t])),  logits = head_i s,
    w = 0.5^(0.5 / n),  e = sqrt((1 - w^2) inner / 2),  n = number of heads,

so that at the last head half of the state's magnitude still comes from the target. From Wertheimer et al. 2024, arXiv
2404.19124, and the published code. ln is an RMS norm with weight and bias, gelu the exact one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from speccompile.export.feature_draft import fill_weights
from speccompile.export.tree_drafters import Above, take
from speccompile.speculators.mlp.config import HeadsSizes

EPSILON = 1e-6


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), then weight and bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normed tensor: [..., size] -> the same."""
        return normalise(x) * self.weight + self.bias


def normalise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)


class MlpHeads(nn.Module):
    """All heads of a speculator, by published names without prefix; shared weights are one parameter."""

    def __init__(self, sizes: HeadsSizes) -> None:
        super().__init__()
        self.sizes = sizes
        inner, vocab, hidden = sizes.inner_size, sizes.vocab_size, sizes.hidden_size
        self.emb, self.proj, self.head, self.ln = (nn.ModuleList() for _ in range(4))
        for i in range(sizes.num_heads):
            is_own = sizes.shares("head", i) == i
            self.emb.append(nn.Embedding(vocab, inner) if is_own else self.emb[0])
            self.head.append(nn.Linear(inner, vocab, bias=False) if is_own else self.head[0])
            self.ln.append(RmsNorm(inner) if is_own else self.ln[0])
            is_own = sizes.shares("proj", i) == i
            width = hidden if i == 0 else inner
            self.proj.append(nn.Linear(width, inner, bias=False) if is_own else self.proj[1])
        state_weight = 0.5 ** (0.5 / sizes.num_heads)
        self.token_weight = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the first state of target states [batch, paths, hidden]."""
        return normalise(hidden) / math.sqrt(2) if self.sizes.scales_input else hidden

    def step(self, index: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a head's next state [batch, paths, inner], and logits [batch, paths, vocab].

        Args:
            state: [batch, paths, width]; a chain has one path.
            tokens: [batch, paths] int64, the last token of each.
        """
        state = self.advance(index, state, tokens)
        return state, self.head[index](state)

    def advance(self, index: int, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the next state of `step`, which is all of it but the LM head."""
        mixed = self.proj[index](state) + self.token_weight * self.emb[index](tokens)
        return functional.gelu(self.ln[index](mixed))


class MlpExpander(nn.Module):
    """An `export.tree_drafters.Expander`; the state of a node is that of its path."""

    def __init__(self, heads: MlpHeads) -> None:
        super().__init__()
        self.heads = heads

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.heads.begin(hidden)

    def expand(
        self, depth: int, state: torch.Tensor, tokens: torch.Tensor, above: Above
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.heads.step(depth, take(state, above), tokens)


def make_heads(sizes: HeadsSizes, weights: Mapping[str, torch.Tensor] | None = None) -> MlpHeads:
    """Returns heads in float32 of weights by published name without prefix, shared ones under their first name.

    None: random ones, the same every time, scaled as before training.
    """
    with torch.device("meta"):
        heads = MlpHeads(sizes)
    fill_weights(heads, weights, std=sizes.inner_size**-0.5)
    return heads.eval()
