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
    depth1 = Shape(path, start=1)
    row = Where(path >= 0, path, Range(0, Squeeze(depth1), 1)) + Unsqueeze(lengths, [1])
    rows = Expand(Unsqueeze(row, [1, 3]), Concat(Shape(cache, end=2), depth1, [1], axis=0))
    updated = TensorScatter(cache, GatherND(cache, rows, batch_dims=2), lengths, axis=2, mode="linear")
    """,
)
