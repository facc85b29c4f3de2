# SPDX-License-Identifier: Apache-2.0
"""The attention of chains over a whole text, for all starts at once, as a function of transformers' registry.

The first draft of every position is one causal run over the text. A further draft sees the first run's rows up to its
chain's start, and its chain's own: exactly what the cache holds when that token is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from speccompile.errors import ExportError

IMPLEMENTATION = "speccompile_chains"  # the name under which transformers finds `attend_chains`
KeyValues = tuple[torch.Tensor, torch.Tensor]  # [batch, kv_heads, rows, head_dim] each
# (tokens [batch, nodes], features [batch, nodes, hidden] before them, their positions) -> own features
Advance = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Mask = tuple[int, torch.Tensor]  # the token and the feature [hidden] that stand for drafts


@dataclass
class Chains:
    """Keys and values of the runs so far; `drafted` has those of each later run, a row a chain, by module.

    `first_positions`: [batch, starts] int64, position at which each chain starts; None during the first run.
    """

    first_positions: torch.Tensor | None = None
    context: dict[nn.Module, KeyValues] = field(default_factory=dict)  # of the first run, by the attention's module
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
    """Returns [batch, nodes, heads, head_dim] of queries [batch, heads, nodes, head_dim], and keeps keys and values."""
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


def chain_features(
    advance: Advance,
    tokens: torch.Tensor,
    features: torch.Tensor,
    first_positions: torch.Tensor,
    num: int,
    mask: Mask | None = None,
) -> list[torch.Tensor]:
    """Returns the own features of each draft of chains over a text, [batch, starts, hidden]; drafts follow the text.

    Args:
        advance: a step of the drafter, whose attention must be `attend_chains`.
        tokens: [batch, nodes] int64.
        features: [batch, nodes, hidden], of the target; those of the last position are not read.
        first_positions: [batch, starts] int64, the positions before the roots.
        mask: read in the place of drafts; None: drafts are read.
    """
    chains, (count, last) = Chains(), (tokens.shape[0], tokens.shape[1] - 1)
    with running(chains):
        own = advance(tokens[:, 1:], features[:, :last], torch.arange(last, device=tokens.device).expand(count, -1))
        own = torch.gather(own, 1, first_positions[..., None].expand(-1, -1, own.shape[-1]))
        made, chains.first_positions = [own], first_positions
        for step in range(1, num):
            after = torch.gather(tokens, 1, (first_positions + 1 + step).clamp(max=last))
            if mask is not None:
                after, own = torch.full_like(after, mask[0]), mask[1].expand_as(own)
            own = advance(after, own, first_positions + step)
            made.append(own)
    return made


def drawn_chains(
    advance: Advance,
    tokens: torch.Tensor,
    features: torch.Tensor,
    num: int,
    share: float,
    seed: int,
    mask: Mask | None = None,
    is_label: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns own features [batch * starts, num, hidden] of chains from drawn positions, and the drafts' labels.

    A label is the position in the flattened tokens [batch * nodes]; -1 after the text's end.

    Args:
        tokens: [batch, nodes] int64.
        features: [batch, nodes, hidden], of the target.
        share: of the positions that are starts, above 0 and at most 1.
        is_label: [batch, nodes] bool, of roots from which chains start rather than from others.
    """
    last = tokens.shape[1] - 1
    first = drawn_positions(tokens, last, round(last * share), seed, None if is_label is None else is_label[:, 1:])
    own = torch.stack(chain_features(advance, tokens, features, first, num, mask), 2)
    return own.flatten(0, 1), labels_of(tokens, first + 1, num)


def drawn_positions(
    tokens: torch.Tensor, most: int, num: int, seed: int, wanted: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns different positions below `most` of each row of tokens [batch, nodes], [batch, num]; at least one.

    `wanted` [batch, most or more] bool are taken before all others.
    """
    generator = torch.Generator().manual_seed(seed % 2**31)
    rows = [torch.randperm(most, generator=generator, device="cpu") for _ in range(len(tokens))]
    drawn = torch.stack(rows).to(tokens.device)
    if wanted is not None:
        is_later = ~torch.gather(wanted, 1, drawn)
        drawn = torch.gather(drawn, 1, is_later.to(torch.int8).argsort(dim=1, stable=True))
    return drawn[:, : max(1, num)]


def labels_of(tokens: torch.Tensor, roots: torch.Tensor, num: int) -> torch.Tensor:
    """Returns the positions in flattened tokens whose distributions chains imitate: [batch * starts, num] int64.

    -1 is after the end of a row. `roots` are [batch, starts] int64; the first label is that of the root itself.
    """
    count, nodes = tokens.shape
    ahead = roots[..., None] + torch.arange(num, device=roots.device)
    rows = torch.arange(count, device=roots.device)[:, None, None]
    return torch.where(ahead < nodes, rows * nodes + ahead, -1).flatten(0, 1)


def cut_chains(tokens: torch.Tensor, states: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns states [batch, nodes, width] as chains of `num`, and their labels, -1 where the last is longer."""
    count, nodes = tokens.shape
    roots = torch.arange(0, nodes, num, device=tokens.device).expand(count, -1)
    whole = nn.functional.pad(states, (0, 0, 0, -nodes % num))
    return whole.reshape(-1, num, states.shape[-1]), labels_of(tokens, roots, num)


@torch.no_grad()
def greedy_chain(
    advance: Advance,
    token_of: Callable[[torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    features: torch.Tensor,
    num: int,
    mask: Mask | None = None,
) -> torch.Tensor:
    """Returns one chain [num] int64 after a text: the drafts are read, or masks in their place.

    Args:
        token_of: own features [1, 1, hidden] -> the token with the highest score [1, 1].
        tokens: [1, nodes + 1] int64; the last one is the root.
        features: [1, nodes, hidden], of the target.
    """
    chains, last, drafted = Chains(), features.shape[1] - 1, []
    with running(chains):
        own = advance(tokens[:, 1:], features, torch.arange(last + 1, device=tokens.device)[None])[:, -1:]
        chains.first_positions = torch.full((1, 1), last, device=tokens.device)
        for step in range(num):
            token = token_of(own)
            drafted.append(token[0, 0])
            if mask is not None:
                token, own = torch.full_like(token, mask[0]), mask[1].expand_as(own)
            if step + 1 < num:
                own = advance(token, own, torch.full((1, 1), last + 1 + step, device=tokens.device))
    return torch.stack(drafted)


def register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend_chains)
