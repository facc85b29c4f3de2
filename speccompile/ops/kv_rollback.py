# SPDX-License-Identifier: Apache-2.0
"""KVRollback: keep one path of a scored tree in a cache, in place."""

from __future__ import annotations

import numpy as np

from speccompile.core.specs import LENGTHS, PATH, TensorSpec
from speccompile.core.tree import Floats, Ints
from speccompile.ops.op import Op

_CACHE_DIMS = ("batch", "kv_heads", "max_seq", "head_dim")


def kv_rollback(cache: Floats, lengths: Ints, path: Ints) -> tuple[Floats]:
    """The numpy twin: row lengths[b] + i of slot b becomes row lengths[b] + path[b, i]; -1 keeps the row.

    Args:
        cache: [batch, kv_heads, max_seq, head_dim] float32.
        lengths: [batch] int64, entries before the step that wrote the tree; lengths + depth <= max_seq.
        path: [batch, depth] int64.
    """
    moved = cache.copy()
    for slot, length in enumerate(lengths):
        for i in np.flatnonzero(path[slot] >= 0):
            moved[slot, :, length + i] = cache[slot, :, length + path[slot, i]]
    return (moved,)


# The rows are gathered before they are scattered, so a path may overlap itself. TensorScatter writes in place
# when its output is bound to the same memory as its input.
KV_ROLLBACK = Op(
    "KVRollback",
    (
        TensorSpec("cache", _CACHE_DIMS, "float32"),
        TensorSpec(LENGTHS, ("batch",), "int64"),
        TensorSpec(PATH, ("batch", "depth"), "int64"),
    ),
    (TensorSpec("updated", _CACHE_DIMS, "float32"),),
    kv_rollback,
    """
    none = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    second = Constant<value_ints = [1]>()
    outer = Constant<value_ints = [1, 3]>()
    depth1 = Shape<start = 1>(path)
    depth = Squeeze(depth1)
    same = Range(none, depth, one)
    is_on_path = GreaterOrEqual(path, none)
    node = Where(is_on_path, path, same)
    base = Unsqueeze(lengths, second)
    row = Add(node, base)
    row4 = Unsqueeze(row, outer)
    slots_heads = Shape<end = 2>(cache)
    unit = Constant<value_ints = [1]>()
    shape = Concat<axis = 0>(slots_heads, depth1, unit)
    rows = Expand(row4, shape)
    kept = GatherND<batch_dims = 2>(cache, rows)
    updated = TensorScatter<axis = 2, mode = "linear">(cache, kept, lengths)
    """,
)
