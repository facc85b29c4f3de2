# SPDX-License-Identifier: Apache-2.0
"""CachedAttention: append K and V of a token tree to static caches and attend to past and ancestors.

The neutral form of the export, which backends lower. SinkAttention has a sink: a learned logit of each head, one more
column of the softmax without a value. SharedAttention reads another layer's updated caches, and writes nothing.
"""

from __future__ import annotations

import numpy as np

from speccompile.core.specs import LENGTHS, TREE_MASK, TensorSpec
from speccompile.core.tree import Bools, Floats, Ints
from speccompile.ops.op import Op
from speccompile.ops.row_products import matmul_rows

_CACHE_DIMS = ("batch", "kv_heads", "max_seq", "head_dim")
_NEW_DIMS = ("batch", "kv_heads", "nodes", "head_dim")


def visible_rows(lengths: Ints, tree_mask: Bools, max_seq: int, window: int) -> Bools:
    """Returns the cache rows that each node sees, [batch, nodes, max_seq] bool.

    Args:
        lengths: [batch] int64, rows in use before the step.
        tree_mask: [batch, nodes, nodes] bool. A node sees itself. It may see later nodes, as in an image; its position
            is the number of earlier ones that it sees, after `lengths`.
        window: a key is seen only where position(query) - position(key) < window; 0 = no limit.
    """
    batch, nodes, _ = tree_mask.shape
    depths = np.tril(tree_mask).sum(axis=-1) - 1
    visible = np.broadcast_to((np.arange(max_seq) < lengths[:, None])[:, None], (batch, nodes, max_seq)).copy()
    key = np.broadcast_to(np.arange(max_seq), (batch, max_seq)).copy()
    for slot, length in enumerate(lengths):
        visible[slot, :, length : length + nodes] = tree_mask[slot]
        key[slot, length : length + nodes] = length + depths[slot]
    if window > 0:
        query = lengths[:, None] + depths
        visible &= query[:, :, None] - key[:, None, :] < window
    return visible


def cached_attention(
    q: Floats,
    k: Floats,
    v: Floats,
    k_cache: Floats,
    v_cache: Floats,
    lengths: Ints,
    tree_mask: Bools,
    sinks: Floats | None = None,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    window: int = 0,
) -> tuple[Floats, Floats, Floats]:
    """The numpy twin of both ops. Returns out [batch, nodes, heads, head_dim], and the two updated caches.

    Args:
        q: [batch, heads, nodes, head_dim] float32.
        k: [batch, kv_heads, nodes, head_dim] float32; `v` alike.
        k_cache: [batch, kv_heads, max_seq, head_dim] float32; `v_cache` alike.
        lengths: [batch] int64, rows in use before this step.
        tree_mask: [batch, nodes, nodes] bool, true at the node and its ancestors.
        sinks: [heads] float32, see above; None: none.
        softcap: scores become softcap * tanh(score / softcap); 0 = off.
        window: a key is seen where position(query) - position(key) < window; 0 = off.
    """
    k_all, v_all, nodes = k_cache.copy(), v_cache.copy(), q.shape[2]
    for slot, length in enumerate(lengths):
        k_all[slot, :, length : length + nodes], v_all[slot, :, length : length + nodes] = k[slot], v[slot]
    attributes = {"scale": scale, "softcap": softcap, "window": window}
    (out,) = shared_attention(q, k_all, v_all, lengths, tree_mask, sinks, **attributes)  # type: ignore[arg-type]
    return out, k_all, v_all


def shared_attention(
    q: Floats,
    k_cache: Floats,
    v_cache: Floats,
    lengths: Ints,
    tree_mask: Bools,
    sinks: Floats | None = None,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    window: int = 0,
) -> tuple[Floats]:
    """The numpy twin of SharedAttention: the `out` of `cached_attention` where the nodes' rows are in the caches."""
    k_all, v_all, group = k_cache, v_cache, q.shape[1] // k_cache.shape[1]
    scores = scale * matmul_rows(q, np.repeat(k_all, group, axis=1).swapaxes(2, 3))
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    visible = visible_rows(lengths, tree_mask, k_cache.shape[2], window)[:, None]
    scores = np.where(visible, scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks[:, None, None])
    probs = np.exp(scores - largest)
    total = probs.sum(axis=-1, keepdims=True)
    probs /= total if sinks is None else total + np.exp(sinks[:, None, None] - largest)
    out = matmul_rows(probs, np.repeat(v_all, group, axis=1)).swapaxes(1, 2)
    return (np.ascontiguousarray(out, dtype=np.float32),)


_INPUTS = (
    TensorSpec("q", ("batch", "heads", "nodes", "head_dim"), "float32"),
    TensorSpec("k", _NEW_DIMS, "float32"),
    TensorSpec("v", _NEW_DIMS, "float32"),
    TensorSpec("k_cache", _CACHE_DIMS, "float32"),
    TensorSpec("v_cache", _CACHE_DIMS, "float32"),
    TensorSpec(LENGTHS, ("batch",), "int64"),
    TensorSpec(TREE_MASK, ("batch", "nodes", "nodes"), "bool"),
)
_OUTPUTS = (
    TensorSpec("out", ("batch", "nodes", "heads", "head_dim"), "float32"),
    TensorSpec("k_updated", _CACHE_DIMS, "float32"),
    TensorSpec("v_updated", _CACHE_DIMS, "float32"),
)
_WRITE_K = """
    k_updated = TensorScatter(k_cache, k, lengths, axis=2, mode="linear")
"""
_WRITE = f"""{_WRITE_K}
    v_updated = TensorScatter(v_cache, v, lengths, axis=2, mode="linear")
"""
# The last node has a second row, as ONNX Runtime sums the products of one row alone in another order.
_MASK = """
    max_seq1 = Shape(k_cache, start=2, end=3)
    rows = Range(0, Squeeze(max_seq1), 1)
    base = Unsqueeze(lengths, [1])
    past = Where(Unsqueeze(rows < base, [1]), 0.0, -1e30)
    past_full = Expand(past, Concat(Shape(tree_mask, end=2), max_seq1, axis=0))
    linked = TensorScatter(past_full, Where(tree_mask, 0.0, -1e30), lengths, axis=2, mode="linear")
    query = ReduceSum(Trilu(int64(tree_mask), upper=0), [2], keepdims=0) - 1 + base
    key_past = Expand(rows, Concat(Shape(tree_mask, end=1), max_seq1, axis=0))
    key = TensorScatter(key_past, query, lengths, axis=1, mode="linear")
    reach = Where(attr.window > 0, attr.window, 4611686018427387904)
    mask = Where(Unsqueeze(query, [2]) - Unsqueeze(key, [1]) < reach, linked, -1e30)
    mask4 = Unsqueeze(mask, [1])
    q_rows = Concat(q, Slice(q, [-1], [9223372036854775807], [2]), axis=2)
    mask_rows = Concat(mask4, Slice(mask4, [-1], [9223372036854775807], [2]), axis=2)
"""
CACHED_ATTENTION = Op(
    "CachedAttention",
    _INPUTS,
    _OUTPUTS,
    cached_attention,
    f"""{_WRITE}{_MASK}
    with_last = Attention(q_rows, k_updated, v_updated, mask_rows, scale=attr.scale, softcap=attr.softcap)
    out = Transpose(Slice(with_last, [0], [-1], [2]), perm=[0, 2, 1, 3])
    """,
    attributes={"scale": 1.0, "softcap": 0.0, "window": 0},
)

# A sink scales what the softmax without it gives: by sum(e^score) / (sum(e^score) + e^sink), a sigmoid of logarithms.
SINK_ATTENTION = Op(
    "SinkAttention",
    (*_INPUTS, TensorSpec("sinks", ("heads",), "float32")),
    _OUTPUTS,
    cached_attention,
    f"""{_WRITE}{_MASK}
    with_last, present_k, present_v, scores = Attention(
        q_rows, k_updated, v_updated, mask_rows, scale=attr.scale, qk_matmul_output_mode=2
    )
    above = ReduceLogSumExp(scores, [-1], keepdims=1) - Unsqueeze(sinks, [1, 2])
    out = Transpose(Slice(with_last * Sigmoid(above), [0], [-1], [2]), perm=[0, 2, 1, 3])
    """,
    attributes={"scale": 1.0, "window": 0},
)


def latent_attention(
    q: Floats,
    k: Floats,
    k_cache: Floats,
    lengths: Ints,
    tree_mask: Bools,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    window: int = 0,
) -> tuple[Floats, Floats]:
    """The numpy twin of LatentAttention: `cached_attention` whose K is V too, in one cache; arguments as there."""
    attributes = {"scale": scale, "softcap": softcap, "window": window}
    out, k_updated, _ = cached_attention(q, k, k, k_cache, k_cache, lengths, tree_mask, **attributes)  # type: ignore[arg-type]
    return out, k_updated


# For kernels alone, which would write two caches; the neutral form is CachedAttention, given K twice.
LATENT_ATTENTION = Op(
    "LatentAttention",
    (_INPUTS[0], _INPUTS[1], _INPUTS[3], *_INPUTS[5:]),
    _OUTPUTS[:2],
    latent_attention,
    f"""{_WRITE_K}{_MASK}
    with_last = Attention(q_rows, k_updated, k_updated, mask_rows, scale=attr.scale, softcap=attr.softcap)
    out = Transpose(Slice(with_last, [0], [-1], [2]), perm=[0, 2, 1, 3])
    """,
    attributes=CACHED_ATTENTION.attributes,
)
# For layers that have no K and V of their own.
SHARED_ATTENTION = Op(
    "SharedAttention",
    (_INPUTS[0], *_INPUTS[3:]),
    _OUTPUTS[:1],
    shared_attention,
    f"""{_MASK}
    with_last = Attention(q_rows, k_cache, v_cache, mask_rows, scale=attr.scale, softcap=attr.softcap)
    out = Transpose(Slice(with_last, [0], [-1], [2]), perm=[0, 2, 1, 3])
    """,
    attributes=CACHED_ATTENTION.attributes,
)
ATTENTION_OPS = (CACHED_ATTENTION.name, SINK_ATTENTION.name)
