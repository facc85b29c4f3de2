# SPDX-License-Identifier: Apache-2.0
"""Attention from the rows of a merged Q, K and V product to the rows of the output product, as one op.

Q and K of the four ops get nothing, an RMS norm of each head (`Norm`), a rotary embedding (`Rotary`), or both. A node's
position is its slot's length plus the number of its ancestors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.specs import LENGTHS, TREE_MASK, TensorSpec
from speccompile.core.tree import Bools, Floats, Ints
from speccompile.ops.cached_attention import cached_attention
from speccompile.ops.op import Op

_CACHE_DIMS = ("batch", "kv_heads", "max_seq", "head_dim")
_ATTRIBUTES: dict[str, int | float] = {
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 1,
    "scale": 1.0,
    "softcap": 0.0,
    "window": 0,
}
_NORM: dict[str, int | float] = {"epsilon": 1e-6}
_ROTARY: dict[str, int | float] = {"rotary_dim": 0, "interleaved": 0}


def normalize(x: Floats, gamma: Floats, epsilon: float) -> Floats:
    """Returns the RMS norm of the last axis of `x` float32, times `gamma`."""
    mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean + np.float32(epsilon)) * gamma, np.float32)


def rotate(x: Floats, cos: Floats, sin: Floats, positions: Ints, interleaved: bool) -> Floats:
    """Returns `x` [batch, heads, nodes, head_dim] float32 with its first columns rotated.

    Args:
        cos: [positions, rotary_dim / 2] float32.
        positions: [batch, nodes] int64.
        interleaved: pairs are columns 2i and 2i + 1, otherwise i and i + rotary_dim / 2.
    """
    half = cos.shape[1]
    c, s = cos[positions][:, None], sin[positions][:, None]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    out = x.copy()
    out[..., first], out[..., second] = x[..., first] * c - x[..., second] * s, x[..., second] * c + x[..., first] * s
    return out


def qkv_attention(
    qkv: Floats,
    k_cache: Floats,
    v_cache: Floats,
    lengths: Ints,
    tree_mask: Bools,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    softcap: float,
    window: int,
    gammas: tuple[Floats, Floats] | None = None,
    epsilon: float = 0.0,
    tables: tuple[Floats, Floats] | None = None,
    interleaved: bool = False,
) -> tuple[Floats, Floats, Floats]:
    """The numpy twin of all four ops. Returns out [batch, nodes, num_heads * head_dim] and the two updated caches.

    Args:
        qkv: [batch, nodes, (num_heads + 2 * num_kv_heads) * head_dim] float32: the heads of Q, of K and of V.
        k_cache: [batch, num_kv_heads, max_seq, head_dim] float32.
        lengths: [batch] int64, rows in use before this step.
        tree_mask: [batch, nodes, nodes] bool, true at the node and its ancestors.
        scale: see `cached_attention`; softcap and window alike.
        gammas: weights [head_dim] of the norms of Q's and K's heads; None: no norm.
        tables: cosines and sines [positions, rotary_dim / 2] float32; None: no rotation.
    """
    batch, nodes, _ = qkv.shape
    heads = qkv.reshape(batch, nodes, num_heads + 2 * num_kv_heads, head_dim).transpose(0, 2, 1, 3)
    q, k, v = np.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
    if gammas is not None:
        q, k = normalize(q, gammas[0], epsilon), normalize(k, gammas[1], epsilon)
    if tables is not None:
        positions = lengths[:, None] + np.tril(tree_mask).sum(axis=-1) - 1
        q, k = (rotate(x, *tables, positions, interleaved) for x in (q, k))
    step = (q, k, v, k_cache, v_cache, lengths, tree_mask)
    out, k_updated, v_updated = cached_attention(*step, scale=scale, softcap=softcap, window=window)
    return out.reshape(batch, nodes, -1), k_updated, v_updated


def _twin(has_norm: bool, is_rotary: bool) -> Callable[..., tuple[Floats, Floats, Floats]]:
    def twin(
        qkv: Floats, *inputs: NDArray[Any], rotary_dim: int = 0, interleaved: int = 0, **attributes: Any
    ) -> tuple[Floats, Floats, Floats]:
        del rotary_dim  # the width of the tables
        given = list(inputs)
        gammas = (given.pop(0), given.pop(0)) if has_norm else None
        tables = (given.pop(0), given.pop(0)) if is_rotary else None
        k_cache, v_cache, lengths, tree_mask, _ = given
        step = (qkv, k_cache, v_cache, lengths, tree_mask)
        return qkv_attention(*step, gammas=gammas, tables=tables, interleaved=bool(interleaved), **attributes)

    return twin


_SPLIT = """
    heads1 = Reshape(attr.num_heads, [1])
    kv_heads1 = Reshape(attr.num_kv_heads, [1])
    head_dim1 = Reshape(attr.head_dim, [1])
    zero1 = Reshape(0, [1])
    heads = Transpose(Reshape(qkv, Concat([0, 0, -1], head_dim1, axis=0)), perm=[0, 2, 1, 3])
    q, k, v = Split(heads, Concat(heads1, kv_heads1, kv_heads1, axis=0), axis=1)
    base = Unsqueeze(lengths, [1])
    depth = ReduceSum(Trilu(int64(tree_mask), upper=0), [2], keepdims=0) - 1
    positions = depth + base
"""
_NORMALIZE = """
    q_normed = RMSNormalization(q, q_gamma, axis=-1, epsilon=attr.epsilon)
    k_normed = RMSNormalization(k, k_gamma, axis=-1, epsilon=attr.epsilon)
"""
_ROTATE = """
    {q}_turned = RotaryEmbedding(
        {q}, cos, sin, positions, interleaved=attr.interleaved, rotary_embedding_dim=attr.rotary_dim
    )
    {k}_turned = RotaryEmbedding(
        {k}, cos, sin, positions, interleaved=attr.interleaved, rotary_embedding_dim=attr.rotary_dim
    )
"""
# The mask depends on no cache but by the number of its rows, which is an input: ONNX Runtime then finds that the nodes
# of all layers compute one value. One gather covers past rows, nodes and unused rows, see `passes/attention_mask.py`.
# The last node has a second row, as ONNX Runtime sums the products of one row alone in another order.
_ATTEND = """
    k_updated = TensorScatter(k_cache, {k}, lengths, axis=2, mode="linear")
    v_updated = TensorScatter(v_cache, v, lengths, axis=2, mode="linear")
    reach = Where(attr.window > 0, attr.window, 4611686018427387904)
    seen = tree_mask & (Unsqueeze(depth, [2]) - Unsqueeze(depth, [1]) < reach)
    with_past = Pad(Where(seen, 0.0, -1e30), [0, 0, 1, 0, 0, 0], 0.0)
    all_rows = Range(0, Squeeze(num_rows), 1)
    not_before = Max(all_rows + 1 - Unsqueeze(base, [2]), zero1)
    mask_shape = Concat(Shape(tree_mask, end=2), num_rows, axis=0)
    columns = Expand(Min(not_before, Shape(tree_mask, start=2) + [1]), mask_shape)
    tree_part = GatherElements(Pad(with_past, [0, 0, 0, 0, 0, 1], -1e30), columns, axis=2)
    mask = Where(all_rows > Unsqueeze(positions, [2]) - reach, tree_part, -1e30)
    tiles = Concat([1], Reshape(attr.num_heads / attr.num_kv_heads, [1]), [1], axis=0)
    mask4 = Unsqueeze(Tile(mask, tiles), [1])
    q_folded = Reshape({q}, Concat(zero1, kv_heads1, [-1], head_dim1, axis=0))
    q_rows = Concat(q_folded, Slice(q_folded, [-1], [9223372036854775807], [2]), axis=2)
    mask_rows = Concat(mask4, Slice(mask4, [-1], [9223372036854775807], [2]), axis=2)
    with_last = Attention(q_rows, k_updated, v_updated, mask_rows, scale=attr.scale, softcap=attr.softcap)
    unfold = Concat(zero1, heads1, [-1], head_dim1, axis=0)
    by_node = Transpose(Reshape(Slice(with_last, zero1, [-1], [2]), unfold), perm=[0, 2, 1, 3])
    out = Reshape(by_node, [0, 0, -1])
"""


def _make(has_norm: bool, is_rotary: bool) -> Op:
    name = f"{'Norm' if has_norm else ''}{'Rotary' if is_rotary else ''}QkvAttention"
    q, k = ("q_normed", "k_normed") if has_norm else ("q", "k")
    body = _SPLIT + (_NORMALIZE if has_norm else "") + (_ROTATE.format(q=q, k=k) if is_rotary else "")
    turned = "_turned" if is_rotary else ""
    gammas = [TensorSpec(f"{n}_gamma", ("head_dim",), "float32") for n in "qk"]
    tables = [TensorSpec(n, ("positions", "half_rotary_dim"), "float32") for n in ("cos", "sin")]
    inputs = (
        TensorSpec("qkv", ("batch", "nodes", "qkv_dim"), "float32"),
        *(gammas if has_norm else ()),
        *(tables if is_rotary else ()),
        TensorSpec("k_cache", _CACHE_DIMS, "float32"),
        TensorSpec("v_cache", _CACHE_DIMS, "float32"),
        TensorSpec(LENGTHS, ("batch",), "int64"),
        TensorSpec(TREE_MASK, ("batch", "nodes", "nodes"), "bool"),
        TensorSpec("num_rows", ("one",), "int64"),  # max_seq of the caches
    )
    outputs = (
        TensorSpec("out", ("batch", "nodes", "q_dim"), "float32"),
        TensorSpec("k_updated", _CACHE_DIMS, "float32"),
        TensorSpec("v_updated", _CACHE_DIMS, "float32"),
    )
    attributes = {**_ATTRIBUTES, **(_NORM if has_norm else {}), **(_ROTARY if is_rotary else {})}
    body += _ATTEND.format(q=q + turned, k=k + turned)
    return Op(name, inputs, outputs, _twin(has_norm, is_rotary), body, attributes)


# By (whether heads are normalised, whether they are rotated).
QKV_ATTENTION: dict[tuple[bool, bool], Op] = {
    (norm, rotary): _make(norm, rotary) for norm in (False, True) for rotary in (False, True)
}
