# SPDX-License-Identifier: Apache-2.0
"""A draft whose LM head has the rows of a part of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

# Logit of a target token that the draft's vocabulary lacks: its probability is 0 at any temperature below 500, and the
# number is a float16. Drafts are drawn from the returned distributions, so decoding is exact with any logit.
UNKNOWN_LOGIT = -60000.0


def target_tokens(num: int, vocab: int, weights: Mapping[str, torch.Tensor] | None) -> torch.Tensor | None:
    """Returns [num] int64: the target's token of each draft token; None where the vocabularies are one.

    Args:
        weights: with `d2t`, [num] offsets, or `token_map`, where it is reduced; None: evenly spaced tokens.
    """
    if num == vocab and (weights is None or "d2t" not in weights):
        return None
    if weights is None:
        return torch.arange(num) * vocab // num
    if "token_map" in weights:
        return weights["token_map"].to(torch.int64)
    return weights["d2t"].to(torch.int64) + torch.arange(num)


def cut_linear(head: nn.Linear, tokens: torch.Tensor) -> nn.Linear:
    """Returns a head with these rows of `head` alone, in their order; `tokens` is [kept] int64."""
    bias = None if head.bias is None else head.bias.detach()[tokens]
    made = nn.Linear(head.in_features, len(tokens), bias=bias is not None, device="meta")
    made.weight = nn.Parameter(head.weight.detach()[tokens], requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def cut_head(model: Any, tokens: Sequence[int]) -> None:
    """Replace a causal LM's output embeddings by their rows of `tokens`."""
    model.set_output_embeddings(cut_linear(model.get_output_embeddings(), torch.tensor(tokens)))


def spread_index(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns [vocab_size] int64: where each token is among `tokens` [kept], `kept` for those that are not."""
    return torch.full((vocab_size,), len(tokens)).index_copy(0, tokens, torch.arange(len(tokens)))


def spread(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns logits [batch, nodes, vocab] of those kept, `UNKNOWN_LOGIT` for other tokens."""
    nothing = torch.full_like(logits[:, :, :1], UNKNOWN_LOGIT)
    return torch.cat((logits, nothing), 2).index_select(2, index)
