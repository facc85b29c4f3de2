# SPDX-License-Identifier: Apache-2.0
"""LowRank: adds each slot's low-rank change (LoRA, arXiv 2106.09685) to a linear's rows (`plugins/cpu/low_rank.h`).

y = base + (x A^T) B with A and B of the slot's adapter; number 0 is none. A row's numbers depend on that row alone.
"""

from __future__ import annotations

import numpy as np

from speccompile.core.specs import ADAPTER, TensorSpec
from speccompile.core.tree import Floats, Ints
from speccompile.ops.op import Op
from speccompile.ops.row_products import matmul_rows


def low_rank(base: Floats, x: Floats, adapter: Ints, a: Floats, b: Floats) -> tuple[Floats]:
    """The numpy twin. Returns y as `base`.

    Args:
        base: [batch, nodes, out] float32, the linear's own rows.
        x: [batch, nodes, in] float32, which the linear read.
        adapter: [batch] int64.
        a: [adapters, rank, in] float32; those of number 0 are zeros, and so are ranks that an adapter lacks.
        b: [adapters, rank, out] float32, scaled.
    """
    if ((adapter < 0) | (adapter >= len(a))).any():
        raise IndexError(f"an adapter outside 0 to {len(a) - 1}")
    low = matmul_rows(x, np.swapaxes(a, 1, 2)[adapter])
    return ((base + matmul_rows(low, b[adapter])).astype(base.dtype),)


LOW_RANK = Op(
    "LowRank",
    (
        TensorSpec("base", ("batch", "nodes", "num_out"), "float32"),
        TensorSpec("x", ("batch", "nodes", "num_in"), "float32"),
        TensorSpec(ADAPTER, ("batch",), "int64"),
        TensorSpec("a", ("adapters", "rank", "num_in"), "float32"),
        TensorSpec("b", ("adapters", "rank", "num_out"), "float32"),
    ),
    (TensorSpec("y", ("batch", "nodes", "num_out"), "float32"),),
    low_rank,
    # The last row stands twice: ONNX Runtime 1.31.1 multiplies a single row in another order (`passes.mix_rows`).
    """
    twice = Concat(x, Slice(x, [-1], [9223372036854775807], [1]), axis=1)
    low = twice @ Transpose(Gather(a, adapter, axis=0), perm=[0, 2, 1])
    added = low @ Gather(b, adapter, axis=0)
    y = base + Slice(added, [0], [-1], [1])
    """,
)
