# SPDX-License-Identifier: Apache-2.0
"""Finds the gate after a linear of merged gate and up columns: act(one half) * the other half."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from speccompile.ops import packing
from speccompile.ops.packed_linear import GELU_ERF, GELU_TANH, SILU
from speccompile.passes.edit import Editor
from speccompile.passes.match import ints, only_use


@dataclass(frozen=True)
class Gate:
    """act(one half of a linear's columns) * the other half."""

    last: ir.Node
    activation: int
    is_second: bool


def _activation_of(half: ir.Value, other: ir.Value) -> tuple[ir.Node, int] | None:
    """Returns the Mul of `other` and an activation of `half`, and its kind."""
    users = [use.node for use in half.uses()]
    if half.is_graph_output() or any(user.domain != "" for user in users):
        return None
    by_type = {user.op_type: user for user in users}
    if list(by_type) == ["Gelu"] and len(users) == 1:
        approximate = users[0].attributes.get("approximate")
        kind = GELU_TANH if approximate is not None and approximate.as_string() == "tanh" else GELU_ERF
        active = users[0].outputs[0]
    elif set(by_type) == {"Sigmoid", "Mul"} and len(users) == 2:
        product = by_type["Mul"]
        if only_use(by_type["Sigmoid"].outputs[0]) is not product:
            return None
        kind, active = SILU, product.outputs[0]
    else:
        return None
    last = only_use(active)
    if last is None or last.op_type != "Mul" or last.domain != "" or only_use(other) is not last:
        return None
    return last, kind


def gate_of(product: ir.Value, num_out: int, num_dims: int) -> Gate | None:
    """Returns the gate that alone reads a linear's result; None where there is none. `product`: [..., num_out]."""
    split = only_use(product)
    if split is None or split.op_type != "Split" or split.domain != "" or len(split.outputs) != 2 or num_out % 2:
        return None
    axis = split.attributes.get("axis")
    sizes = ints(split.inputs[1]) if len(split.inputs) > 1 else [num_out // 2] * 2
    if axis is None or axis.as_int() not in (-1, num_dims - 1) or sizes != [num_out // 2] * 2:
        return None
    first, second = split.outputs
    for half, other in ((first, second), (second, first)):
        found = _activation_of(half, other)
        if found is not None:
            return Gate(*found, is_second=half is second)
    return None


def arranged(array: np.ndarray, gate: Gate | None) -> np.ndarray:
    """Returns the columns of a linear [..., out] in the order of packed weights: with a gate, the halves in turn."""
    if gate is None:
        return array
    return packing.interleave_gate(_swapped_halves(array) if gate.is_second else array)


def _swapped_halves(array: np.ndarray) -> np.ndarray:
    half = array.shape[-1] // 2
    return np.concatenate([array[..., half:], array[..., :half]], axis=-1)


def packed_bias(bias: ir.Value | None, gate: Gate | None, shape: tuple[int, ...], edit: Editor) -> ir.Value:
    """Returns the bias of a packed linear (None: zeros), its columns in the order of the packed weights."""
    if bias is None:
        return edit.const(np.zeros(shape, np.float32), f"zeros.{'.'.join(map(str, shape))}")
    if gate is None or not gate.is_second:
        return bias
    tensor = bias.const_value
    assert tensor is not None
    return edit.const(_swapped_halves(tensor.numpy()), f"{bias.name}.swapped")
