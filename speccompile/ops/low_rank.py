# SPDX-License-Identifier: Apache-2.0
"""LowRank: adds each slot's low-rank change (LoRA, arXiv 2106.09685) to a linear's rows (`plugins/cpu/low_rank.h`).

y = base + (x A^T) B with A and B of the slot's adapter; number 0 is none. GatedLowRank applies a gate to it, as
GatedPackedLinear does. AddNorm is the residual and norm that two readers have, the linear and its LowRank. A row's
numbers depend on that row alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from speccompile.core.specs import ADAPTER, TensorSpec
from speccompile.core.tree import Floats, Ints
from speccompile.ops.op import Op
from speccompile.ops.packed_bodies import GATE, NORM
from speccompile.ops.packed_linear import SILU, activated, normalized
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


def gated_low_rank(
    base: Floats, x: Floats, adapter: Ints, a: Floats, b: Floats, *, activation: int = SILU
) -> tuple[Floats]:
    """The numpy twin: act(first half of the columns) * second half."""
    gate, up = np.split(low_rank(base, x, adapter, a, b)[0], 2, axis=-1)
    return ((activated(gate, activation) * up).astype(base.dtype),)


def add_norm(x: Floats, residual: Floats, gamma: Floats, *, epsilon: float = 1e-6) -> tuple[Floats, Floats]:
    """The numpy twin. Returns RMSNorm(x + residual) * gamma, and the sum."""
    total = x + residual
    return normalized(total, gamma, epsilon), total


# The last row stands twice: ONNX Runtime 1.31.1 multiplies a single row in another order (`passes.mix_rows`).
_CHANGED = """
    twice = Concat(x, Slice(x, [-1], [9223372036854775807], [1]), axis=1)
    low = twice @ Transpose(Gather(a, adapter, axis=0), perm=[0, 2, 1])
    added = low @ Gather(b, adapter, axis=0)
    biased = base + Slice(added, [0], [-1], [1])
"""

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
    f"{_CHANGED}    y = Identity(biased)",
)

GATED_LOW_RANK = replace(
    LOW_RANK,
    name="GatedLowRank",
    outputs=(TensorSpec("y", ("batch", "nodes", "half_out"), "float32"),),
    twin=gated_low_rank,
    body=f"{_CHANGED}{GATE}",
    attributes={"activation": SILU},
)

_ROWS = ("batch", "nodes", "num_in")
ADD_NORM = Op(
    "AddNorm",
    (
        TensorSpec("x", _ROWS, "float32"),
        TensorSpec("residual", _ROWS, "float32"),
        TensorSpec("gamma", ("num_in",), "float32"),
    ),
    (TensorSpec("y", _ROWS, "float32"), TensorSpec("sum", _ROWS, "float32")),
    add_norm,
    f"{NORM}    y = Identity(source)",
    attributes={"epsilon": 1e-6},
)
