# SPDX-License-Identifier: Apache-2.0
"""CrossAttention: attend to the first rows of caches that another graph writes.

The neutral form of the export, which backends lower; nothing is written. RotaryCrossAttention is that of our CPU
kernels: from the rows of the product for Q to the rows of the output product.
"""

from __future__ import annotations

import numpy as np

from speccompile.core.specs import TensorSpec
from speccompile.core.tree import Floats, Ints
from speccompile.ops.op import Op
from speccompile.ops.qkv_attention import rotate
from speccompile.ops.row_products import matmul_rows

_CACHE_DIMS = ("batch", "kv_heads", "rows", "head_dim")


def cross_attention(
    q: Floats, k_cache: Floats, v_cache: Floats, limits: Ints, *, scale: float = 1.0, window: int = 0
) -> tuple[Floats]:
    """The numpy twin. Returns out [batch, nodes, heads, head_dim] float32.

    Args:
        q: [batch, heads, nodes, head_dim] float32; several query heads may share a key head.
        k_cache: [batch, kv_heads, rows, head_dim] float32.
        limits: [batch, nodes] int64, at least 1: a node sees the rows below.
        window: of the rows below its limit a node sees the last so many; 0: all.
    """
    group = q.shape[1] // k_cache.shape[1]
    scores = scale * matmul_rows(q, np.repeat(k_cache, group, axis=1).swapaxes(2, 3))
    rows, ends = np.arange(k_cache.shape[2]), limits[:, None, :, None]
    is_seen = (rows < ends) & ((rows >= ends - window) | (window == 0))
    scores = np.where(is_seen, scores, -np.inf)
    probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    out = matmul_rows(probs, np.repeat(v_cache, group, axis=1)).swapaxes(1, 2)
    return (np.ascontiguousarray(out, dtype=np.float32),)


CROSS_ATTENTION = Op(
    "CrossAttention",
    (
        TensorSpec("q", ("batch", "heads", "nodes", "head_dim"), "float32"),
        TensorSpec("k_cache", _CACHE_DIMS, "float32"),
        TensorSpec("v_cache", _CACHE_DIMS, "float32"),
        TensorSpec("limits", ("batch", "nodes"), "int64"),
    ),
    (TensorSpec("out", ("batch", "nodes", "heads", "head_dim"), "float32"),),
    cross_attention,
    """
    rows = Range(0, Squeeze(Shape(k_cache, start=2, end=3)), 1)
    limits3 = Unsqueeze(limits, [2])
    is_near = rows >= limits3 - Where(attr.window > 0, attr.window, 4611686018427387904)
    is_seen = (rows < limits3) & is_near
    mask4 = Unsqueeze(Where(is_seen, 0.0, -1e30), [1])
    attended = Attention(q, k_cache, v_cache, mask4, scale=attr.scale)
    out = Transpose(attended, perm=[0, 2, 1, 3])
    """,
    attributes={"scale": 1.0, "window": 0},
)


def rotary_cross_attention(
    q: Floats,
    cos: Floats,
    sin: Floats,
    k_cache: Floats,
    v_cache: Floats,
    positions: Ints,
    limits: Ints,
    *,
    num_heads: int = 1,
    head_dim: int = 1,
    scale: float = 1.0,
    rotary_dim: int = 0,
    interleaved: int = 0,
) -> tuple[Floats]:
    """The numpy twin. Returns out [batch, nodes, num_heads * head_dim] float32.

    Args:
        q: [batch, nodes, num_heads * head_dim] float32; several query heads may share a key head.
        cos: [positions, rotary_dim / 2] float32.
        k_cache: [batch, kv_heads, rows, head_dim] float32.
        positions: [batch, nodes] int64, rows of `cos`.
        limits: [batch, nodes] int64, at least 1: a node sees the rows below.
        rotary_dim: the first columns of a head, which are rotated; 0: all.
    """
    del rotary_dim  # the width of the tables
    batch, nodes, width = q.shape
    heads = rotate(
        q.reshape(batch, nodes, num_heads, head_dim).transpose(0, 2, 1, 3), cos, sin, positions, interleaved > 0
    )
    (out,) = cross_attention(heads, k_cache, v_cache, limits, scale=scale)
    return (out.reshape(batch, nodes, width),)


ROTARY_CROSS_ATTENTION = Op(
    "RotaryCrossAttention",
    (
        TensorSpec("q", ("batch", "nodes", "q_dim"), "float32"),
        TensorSpec("cos", ("positions", "half_rotary_dim"), "float32"),
        TensorSpec("sin", ("positions", "half_rotary_dim"), "float32"),
        TensorSpec("k_cache", _CACHE_DIMS, "float32"),
        TensorSpec("v_cache", _CACHE_DIMS, "float32"),
        TensorSpec("positions", ("batch", "nodes"), "int64"),
        TensorSpec("limits", ("batch", "nodes"), "int64"),
    ),
    (TensorSpec("out", ("batch", "nodes", "q_dim"), "float32"),),
    rotary_cross_attention,
    """
    in_heads = Concat([0, 0], Reshape(attr.num_heads, [1]), Reshape(attr.head_dim, [1]), axis=0)
    heads = Transpose(Reshape(q, in_heads), perm=[0, 2, 1, 3])
    turned = RotaryEmbedding(
        heads, cos, sin, positions, interleaved=attr.interleaved, rotary_embedding_dim=attr.rotary_dim
    )
    attended = speccompile.CrossAttention(turned, k_cache, v_cache, limits, scale=attr.scale, window=0)
    out = Reshape(attended, [0, 0, -1])
    """,
    attributes={"num_heads": 1, "head_dim": 1, "scale": 1.0, "rotary_dim": 0, "interleaved": 0},
    uses=("CrossAttention",),
)
