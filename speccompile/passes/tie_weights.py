# SPDX-License-Identifier: Apache-2.0
"""Replace a weight that is another one's transposed view by a Transpose of it.

The LM head of tied embeddings is stored once in the plan then: TensorRT reads one constant both ways.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor

_MIN_ELEMENTS = 4096  # smaller weights do not justify a node


def _key(array: np.ndarray) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return int(array.__array_interface__["data"][0]), array.shape, array.strides


def tie_weights(model: ir.Model) -> int:
    """Replace every such weight; returns their number. Views are found by their address, not compared."""
    matrices = [v for v in model.graph.initializers.values() if _is_matrix(v)]
    held = {_key(v.const_value.numpy()): v for v in matrices if v.const_value is not None}
    count = 0
    for value in matrices:
        assert value.const_value is not None and value.name is not None
        array = value.const_value.numpy()
        other = held.get(_key(array.T))
        if other is None or other is value or array.flags.c_contiguous:
            continue
        uses = list(value.uses())
        for user, index in uses:
            turned = Editor(model, user).op("Transpose", other, perm=[1, 0])
            turned.type, turned.shape = ir.TensorType(value.const_value.dtype), value.shape
            user.replace_input_with(index, turned)
        del model.graph.initializers[value.name]
        count += 1
    return count


def _is_matrix(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or len(tensor.shape) != 2 or tensor.size < _MIN_ELEMENTS or not value.uses():
        return False
    return not isinstance(tensor, ir.LazyTensor)  # each view of these is a new object


TIE_WEIGHTS = Pass("tie_weights", tie_weights)
