# SPDX-License-Identifier: Apache-2.0
"""The attention of chains over a whole text, for all starts at once, as a function of transformers' registry.

The first draft of every position is one causal run over the text. A further draft sees the first run's rows up to its
chain's start, and the rows of its own chain: exactly what the cache holds when that token is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from speccompile.errors import ExportError

IMPLEMENTATION = "speccompile_chains"  # the name under which transformers finds `attend_chains`
KeyValues = tuple[torch.Tensor, torch.Tensor]  # [batch, kv_heads, rows, head_dim] each


@dataclass
class Chains:
    """Keys and values of the runs so far.

    Args:
        first_positions: [batch, starts] int64, position at which each chain starts; None during the first run.
        context: of the first run, by the attention's module.
        drafted: of each later run, a row a chain, by the attention's module.
    """

    first_positions: torch.Tensor | None = None
    context: dict[nn.Module, KeyValues] = field(default_factory=dict)
    drafted: dict[nn.Module, list[KeyValues]] = field(default_factory=dict)


_CHAINS: ContextVar[Chains] = ContextVar("speccompile_chains")


@contextmanager
def running(chains: Chains) -> Iterator[None]:
    """Makes `chains` those that the attention of this context reads and extends."""
    token = _CHAINS.set(chains)
    try:
        yield
    finally:
        _CHAINS.reset(token)


def attend_chains(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Returns [batch, nodes, heads, head_dim] of queries [batch, heads, nodes, head_dim], and keeps keys and values.

    Raises:
        ExportError: the layer has a window or a softcap.
    """
    if sliding_window or softcap:
        got = f"a window of {sliding_window} and a softcap of {softcap}"
        todo = "Modules of this architecture cannot be trained or probed."
        raise ExportError(type(module).__name__, got, "full attention", todo)
    chains, group = _CHAINS.get(), query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if chains.first_positions is None:
        chains.context[module] = (key, value)
        keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
        out = nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
        return out.transpose(1, 2), None
    own = chains.drafted.setdefault(module, [])
    own.append((key, value))
    keys, values = (x.repeat_interleave(group, 1) for x in chains.context[module])
    is_later = torch.arange(keys.shape[2], device=query.device) > chains.first_positions[:, None, :, None]
    scores = [(query @ keys.transpose(2, 3)).float().masked_fill(is_later, -math.inf) * scale]
    rows = [(k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)) for k, v in own]
    scores += [(query * k).float().sum(-1, keepdim=True) * scale for k, _ in rows]
    probs = torch.cat(scores, -1).softmax(-1).to(query.dtype)
    attended = probs[..., : keys.shape[2]] @ values
    for i, (_, v) in enumerate(rows):
        attended = attended + probs[..., keys.shape[2] + i, None] * v
    return attended.transpose(1, 2), None


def register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend_chains)
