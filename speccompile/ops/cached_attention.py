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
_WRITE = """
    k_updated = TensorScatter<axis = 2, mode = "linear">(k_cache, k, lengths)
    v_updated = TensorScatter<axis = 2, mode = "linear">(v_cache, v, lengths)
"""
# The last node has a second row, as ONNX Runtime sums the products of one row alone in another order.
_MASK = """
    none = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    third = Constant<value_ints = [2]>()
    second = Constant<value_ints = [1]>()
    visible = Constant<value_float = 0.0>()
    hidden = Constant<value_float = -1e30>()
    endless = Constant<value_int = 4611686018427387904>()
    max_seq1 = Shape<start = 2, end = 3>(k_cache)
    max_seq = Squeeze(max_seq1)
    rows = Range(none, max_seq, one)
    base = Unsqueeze(lengths, second)
    is_past = Less(rows, base)
    is_past3 = Unsqueeze(is_past, second)
    past = Where(is_past3, visible, hidden)
    slots_nodes = Shape<end = 2>(tree_mask)
    mask_shape = Concat<axis = 0>(slots_nodes, max_seq1)
    past_full = Expand(past, mask_shape)
    fresh = Where(tree_mask, visible, hidden)
    linked = TensorScatter<axis = 2, mode = "linear">(past_full, fresh, lengths)
    seen = Cast<to = 7>(tree_mask)
    ancestors = Trilu<upper = 0>(seen)
    count = ReduceSum<keepdims = 0>(ancestors, third)
    depth = Sub(count, one)
    query = Add(depth, base)
    slots = Shape<end = 1>(tree_mask)
    key_shape = Concat<axis = 0>(slots, max_seq1)
    key_past = Expand(rows, key_shape)
    key = TensorScatter<axis = 1, mode = "linear">(key_past, query, lengths)
    query3 = Unsqueeze(query, third)
    key3 = Unsqueeze(key, second)
    distance = Sub(query3, key3)
    window_asked = Constant<value_int: int = @window>()
    is_limited = Greater(window_asked, none)
    reach = Where(is_limited, window_asked, endless)
    is_near = Less(distance, reach)
    mask = Where(is_near, linked, hidden)
    mask4 = Unsqueeze(mask, second)
    first = Constant<value_ints = [0]>()
    last = Constant<value_ints = [-1]>()
    end = Constant<value_ints = [9223372036854775807]>()
    q_last = Slice(q, last, end, third)
    q_rows = Concat<axis = 2>(q, q_last)
    mask_last = Slice(mask4, last, end, third)
    mask_rows = Concat<axis = 2>(mask4, mask_last)
"""
CACHED_ATTENTION = Op(
    "CachedAttention",
    _INPUTS,
    _OUTPUTS,
    cached_attention,
    f"""{_WRITE}{_MASK}
    with_last = Attention<scale: float = @scale, softcap: float = @softcap>(q_rows, k_updated, v_updated, mask_rows)
    attended = Slice(with_last, first, last, third)
    out = Transpose<perm = [0, 2, 1, 3]>(attended)
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
    with_last, present_k, present_v, scores =
        Attention<scale: float = @scale, qk_matmul_output_mode = 2>(q_rows, k_updated, v_updated, mask_rows)
    total = ReduceLogSumExp<keepdims = 1>(scores, last)
    columns = Constant<value_ints = [1, 2]>()
    sinks3 = Unsqueeze(sinks, columns)
    above = Sub(total, sinks3)
    share = Sigmoid(above)
    scaled = Mul(with_last, share)
    attended = Slice(scaled, first, last, third)
    out = Transpose<perm = [0, 2, 1, 3]>(attended)
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
    """
    out, k_updated, v_updated = speccompile.CachedAttention
        <scale: float = @scale, softcap: float = @softcap, window: int = @window>
        (q, k, k, k_cache, k_cache, lengths, tree_mask)
    """,
    attributes=CACHED_ATTENTION.attributes,
    uses=("CachedAttention",),
)
# For layers that have no K and V of their own.
SHARED_ATTENTION = Op(
    "SharedAttention",
    (_INPUTS[0], *_INPUTS[3:]),
    _OUTPUTS[:1],
    shared_attention,
    f"""{_MASK}
    with_last = Attention<scale: float = @scale, softcap: float = @softcap>(q_rows, k_cache, v_cache, mask_rows)
    attended = Slice(with_last, first, last, third)
    out = Transpose<perm = [0, 2, 1, 3]>(attended)
    """,
    attributes=CACHED_ATTENTION.attributes,
)
ATTENTION_OPS = (CACHED_ATTENTION.name, SINK_ATTENTION.name)
