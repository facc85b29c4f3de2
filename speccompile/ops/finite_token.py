# SPDX-License-Identifier: Apache-2.0
"""FiniteToken: the next token of each slot, or -1 where a row of the slot's logits is not finite.

Kernels that choose a token return an arbitrary one from rows of NaN. NaN and infinity persist in one sum over the
logits. Minus infinity masks a token and is allowed.
"""

from __future__ import annotations

import numpy as np

from speccompile.core.specs import LOGITS, NEXT_TOKEN, TensorSpec
from speccompile.core.tree import Floats, Ints
from speccompile.ops.dists import ROWS
from speccompile.ops.op import Op

LARGEST = 2.0**63  # of a row's sum; a logit beyond it overflows at the least temperature (`core.sampling.COLDEST`)


def finite_token(logits: Floats, next_token: Ints) -> tuple[Ints]:
    """The numpy twin, of logits [batch, nodes, vocab] of any float dtype and `next_token` [batch] int64.

    Returns:
        [batch] int64: `next_token`, or -1 where a row of the slot has NaN, infinity, or a sum of `LARGEST`.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        sums = logits.sum(axis=-1, dtype=np.float32)
        is_finite = (sums < np.float32(LARGEST)).all(axis=-1)
    return (np.where(is_finite, next_token, np.int64(-1)),)


FINITE_TOKEN = Op(
    "FiniteToken",
    (TensorSpec(LOGITS, ROWS, "float32"), TensorSpec(NEXT_TOKEN, ("batch",), "int64")),
    (TensorSpec("finite_token", ("batch",), "int64"),),
    finite_token,
    f"""
    sums = ReduceSum(float32(logits), [-1], keepdims=0)
    is_finite = ReduceMin(Where(sums < {LARGEST}, 1.0, 0.0), [-1], keepdims=0) > 0.0
    finite_token = Where(is_finite, next_token, -1)
    """,
)
