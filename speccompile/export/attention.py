# SPDX-License-Identifier: Apache-2.0
"""`speccompile::CachedAttention` as a torch op, and the function of transformers' registry that inserts it.

It replaces cache update, mask and attention; any other argument of an attention layer is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from speccompile.checkpoints.config_values import POSITION_COLUMNS
from speccompile.errors import ExportError

IMPLEMENTATION = "speccompile"  # the name under which transformers finds `attend`

# Arguments that attention layers pass along and that change nothing here: they are either expressed by the op's own
# inputs (positions, masks, caches) or concern training and reporting.
_INERT = {
    "position_ids", "position_embeddings", "cache_position", "is_causal", "use_cache", "dropout", "training",
    "max_length_q", "max_length_k", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits",
    "own_window",  # of an adapter: it is among the frame's windows
}  # fmt: skip


@dataclass
class Frame:
    """One forward pass: the step's inputs, and what the layers record.

    Args:
        caches: K and V of each attention layer, [batch, kv_heads, max_seq, head_dim] float32.
        windows: the sliding window of each layer, 0 = none; None: what the layer passes to its attention.
        states: of each recurrent layer its state, pending rows and rows before its convolution, or these rows alone,
            see `speccompile.core.specs.state_names`.
        image_nodes: [batch, nodes] bool, nodes whose embedding is a row of an image; None: no images are read.
        sources: by layer without K and V of its own, the layer before it whose updated caches it reads.
    """

    lengths: torch.Tensor  # [batch] int64
    tree_mask: torch.Tensor  # [batch, nodes, nodes] bool
    scored_nodes: torch.Tensor  # [batch, scored] int64
    caches: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    windows: Sequence[int] | None = None
    positions: torch.Tensor | None = None  # [batch, nodes] int64, where a model is run; None: of its own computation
    states: Mapping[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    state_lengths: torch.Tensor | None = None  # [batch] int64, tokens that the states hold
    sure_nodes: torch.Tensor | None = None  # [batch] int64, first nodes that are applied to the states
    image_nodes: torch.Tensor | None = None
    image_rows: torch.Tensor | None = None  # [batch, nodes, hidden] float32, those rows
    sources: Mapping[int, int] = field(default_factory=dict)
    readers: set[int] = field(default_factory=set)
    updated: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    updated_states: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    layer_outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden: torch.Tensor | None = None


_FRAME: ContextVar[Frame] = ContextVar("speccompile_frame")


@contextmanager
def forward_pass(frame: Frame) -> Iterator[Frame]:
    """Make `frame` the one that the layers of this context read and write."""
    token = _FRAME.set(frame)
    try:
        yield frame
    finally:
        _FRAME.reset(token)


def state_groups(nums: Mapping[int, int], states: Sequence[torch.Tensor]) -> dict[int, tuple[torch.Tensor, ...]]:
    """Returns the states by layer, from those of all layers in order; `nums` says how many each layer has."""
    held = iter(states)
    return {layer: tuple(next(held) for _ in range(num)) for layer, num in nums.items()}


def cache_pairs(
    layers: Sequence[int], caches: Sequence[torch.Tensor], latent: Sequence[int] = ()
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Returns K and V by layer, from the caches of these layers in order; of a latent layer its one cache twice."""
    held, pairs = iter(caches), {}
    for layer in layers:
        k_cache = next(held)
        pairs[layer] = (k_cache, k_cache if layer in latent else next(held))
    return pairs


def find_frame() -> Frame | None:
    """Returns the frame of the enclosing `forward_pass`; None outside of one."""
    return _FRAME.get(None)


def current_frame() -> Frame:
    return _FRAME.get()


@torch.library.custom_op("speccompile::cached_attention", mutates_args=())
def cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    tree_mask: torch.Tensor,
    scale: float,
    softcap: float,
    window: int,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Writes the new rows into copies of the caches and attends over past and ancestors.

    Arguments and results are those of `ops.cached_attention.cached_attention`.
    """
    batch, _, nodes, _ = k.shape
    rows = lengths[:, None] + torch.arange(nodes)  # [batch, nodes]
    slots = torch.arange(batch)[:, None]
    new_k, new_v = k_cache.clone(), v_cache.clone()
    new_k[slots, :, rows] = k.transpose(1, 2)
    new_v[slots, :, rows] = v.transpose(1, 2)
    return _attend(q, new_k, new_v, lengths, tree_mask, scale, softcap, window, sinks), new_k, new_v


def _attend(
    q: torch.Tensor,
    k_all: torch.Tensor,
    v_all: torch.Tensor,
    lengths: torch.Tensor,
    tree_mask: torch.Tensor,
    scale: float,
    softcap: float,
    window: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the output of `cached_attention`, of its updated caches."""
    batch, nodes, max_seq = q.shape[0], q.shape[2], k_all.shape[2]
    rows = lengths[:, None] + torch.arange(nodes)  # [batch, nodes]
    slots = torch.arange(batch)[:, None]
    row_ids = torch.arange(max_seq).expand(batch, 1, max_seq)
    visible = (row_ids < lengths[:, None, None]).repeat(1, nodes, 1)
    visible[slots[:, :, None], torch.arange(nodes)[None, :, None], rows[:, None, :]] = tree_mask
    if window:
        depth = tree_mask.tril().sum(-1) - 1
        positions = row_ids[:, 0].clone()
        positions[slots, rows] = lengths[:, None] + depth
        query_positions = lengths[:, None] + depth
        visible &= query_positions[:, :, None] - positions[:, None, :] < window
    group = q.shape[1] // k_all.shape[1]
    scores = q @ k_all.repeat_interleave(group, 1).transpose(2, 3) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    probs = scores.softmax(-1)[..., :max_seq]
    return (probs @ v_all.repeat_interleave(group, 1)).transpose(1, 2).contiguous()


@cached_attention.register_fake
def _(q, k, v, k_cache, v_cache, lengths, tree_mask, scale, softcap, window, sinks=None):  # type: ignore[no-untyped-def]
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    return out, torch.empty_like(k_cache), torch.empty_like(v_cache)


@torch.library.custom_op("speccompile::shared_attention", mutates_args=())
def shared_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    tree_mask: torch.Tensor,
    scale: float,
    softcap: float,
    window: int,
) -> torch.Tensor:
    """Returns the output of `cached_attention` over the updated caches of another layer; arguments are as there."""
    return _attend(q, k_cache, v_cache, lengths, tree_mask, scale, softcap, window, None)


@shared_attention.register_fake
def _(q, k_cache, v_cache, lengths, tree_mask, scale, softcap, window):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


@torch.library.custom_op("speccompile::cross_attention", mutates_args=())
def cross_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, limits: torch.Tensor, scale: float, window: int = 0
) -> torch.Tensor:
    """Attend to caches that another graph writes; see `speccompile.ops.cross_attention`."""
    group = q.shape[1] // k_cache.shape[1]
    scores = q @ k_cache.repeat_interleave(group, 1).transpose(2, 3) * scale
    rows, ends = torch.arange(k_cache.shape[2]), limits[:, None, :, None]
    is_seen = rows < ends
    if window:
        is_seen &= rows >= ends - window
    probs = scores.masked_fill(~is_seen, -math.inf).softmax(-1)
    return (probs @ v_cache.repeat_interleave(group, 1)).transpose(1, 2).contiguous()


@cross_attention.register_fake
def _(q, k_cache, v_cache, limits, scale, window=0):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


@torch.library.custom_op("speccompile::gather_nodes", mutates_args=())
def gather_nodes(x: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """Returns the rows of `x` [batch, nodes, hidden] at `nodes` [batch, scored] int64: [batch, scored, hidden]."""
    return torch.gather(x, 1, nodes[:, :, None].expand(-1, -1, x.shape[2]))


@gather_nodes.register_fake
def _(x, nodes):  # type: ignore[no-untyped-def]
    return x.new_empty(nodes.shape[0], nodes.shape[1], x.shape[2])


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' registry: one cached attention for the layer of `module`.

    `s_aux` are the sinks of its heads; `slopes` [heads] those of position biases, slope * position of the key.

    Raises:
        ExportError: the layer passes an argument that the op does not support.
    """
    frame, layer = current_frame(), getattr(module, "layer_idx", None)
    where = f"{type(module).__name__} (layer {layer})"
    width, scale = value.shape[3], query.shape[3] ** -0.5 if scaling is None else float(scaling)
    if slopes is not None:
        query, key, value = _with_positions(frame, query, key, value, slopes / scale)
    elif width < key.shape[3]:
        value = functional.pad(value, (0, key.shape[3] - width))  # caches of K and V have one width
    _check_layer(where, layer, frame, query, key, value, attention_mask)
    for name, given in kwargs.items():
        if given is not None and name not in _INERT:
            raise _cannot_express(where, f"the attention argument `{name}`")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise _cannot_express(where, "attention that is not causal")
    if s_aux is not None and softcap:
        raise _cannot_express(where, "a softcap beside attention sinks")
    if s_aux is not None and layer in frame.sources:
        raise _cannot_express(where, "K and V of another layer beside attention sinks")
    assert layer is not None
    # A transformers layer may pass a window that its mask does not have, or none where it has one.
    window = sliding_window if frame.windows is None else frame.windows[layer]
    step = (frame.lengths, frame.tree_mask, scale, float(softcap or 0.0), int(window or 0))
    if layer in frame.sources:
        frame.readers.add(layer)
        out = shared_attention(query, *frame.updated[frame.sources[layer]], *step)
    else:
        out, new_k, new_v = cached_attention(query, key, value, *frame.caches[layer], *step, s_aux)
        frame.updated[layer] = (new_k, new_v)
    return (out if out.shape[3] == width else out[..., :width]), None


def _with_positions(
    frame: Frame, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns Q and K with columns whose product is slope * position(key), 256 * high + low, exact in all dtypes."""
    positions = frame.lengths[:, None] + frame.tree_mask.to(torch.int64).sum(-1) - 1  # [batch, nodes]
    parts = torch.stack((positions // 256, positions % 256), -1).to(key.dtype)
    columns = functional.pad(parts, (0, POSITION_COLUMNS - 2))[:, None].expand(-1, key.shape[1], -1, -1)
    factors = functional.pad(torch.stack((slopes * 256, slopes), -1), (0, POSITION_COLUMNS - 2))
    factors = factors[None, :, None].expand(query.shape[0], -1, query.shape[2], -1)
    return torch.cat((query, factors), -1), torch.cat((key, columns), -1), functional.pad(value, (0, POSITION_COLUMNS))


def _check_layer(
    where: str,
    layer: int | None,
    frame: Frame,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    owner = layer if layer is None else frame.sources.get(layer, layer)
    is_known = owner in frame.caches and layer not in (*frame.updated, *frame.readers)
    if layer is None or owner is None or not is_known or (owner != layer and owner not in frame.updated):
        raise ExportError(
            where,
            f"layer index {layer}, which is missing, out of range or used twice",
            f"one attention call for each of the {len(frame.caches)} layers with K and V",
            "This architecture cannot be exported.",
        )
    if mask is not None:
        raise _cannot_express(where, "an attention mask (or position bias) of its own")
    heads, dim = frame.caches[owner][0].shape[1], frame.caches[owner][0].shape[3]
    for name, tensor in (("key", key), ("value", value)):
        if (tensor.shape[1], tensor.shape[3]) != (heads, dim) or query.shape[3] != dim:
            raise ExportError(
                where,
                f"{name} heads of {tensor.shape[1]} x {tensor.shape[3]} and query heads of width {query.shape[3]}",
                f"{heads} kv heads of width {dim}, as the config says, in every layer",
                "Caches of differing shape (latent attention, per-layer heads) are not supported.",
            )


def _cannot_express(where: str, what: str) -> ExportError:
    return ExportError(
        where,
        what,
        "causal attention with scale, softcap and sliding window",
        "This architecture cannot be exported; use another target.",
    )


def register() -> None:
    """Registers `attend` with transformers under `IMPLEMENTATION`, without a mask function, so no masks are made."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend)
