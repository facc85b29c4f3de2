# SPDX-License-Identifier: Apache-2.0
"""The weights of few bits of a lowered graph, unpacked by the layouts alone."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from speccompile.ops import packing


def rows_of(graph: Path) -> Iterator[np.ndarray]:
    """Yields the outputs [out, in] float32 of every linear of few bits, unpacked by the layouts alone."""
    model = ir.load(graph)
    for node in model.graph:
        held = [None if v is None or v.const_value is None else v.const_value.numpy() for v in node.inputs]
        gather = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        order = None
        if gather is not None and gather.op_type == "Gather" and gather.inputs[1].const_value is not None:
            order = gather.inputs[1].const_value.numpy()
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        if node.op_type == "MatMulNBits":
            weight = _from_blocks(*held[1:], **attributes)
            user = node.outputs[0].uses()[0].node
            shares = user.inputs[1].producer() if user.op_type == "Add" else None
            if shares is not None and shares.op_type == "MatMul":  # of what zero points leave of minimums
                rest = shares.inputs[1].const_value.numpy().T.astype(np.float64)
                weight += np.repeat(rest, attributes["block_size"], axis=1)[:, : weight.shape[1]]
        elif "LinearInt" in node.op_type or "PackedRowsInt" in node.op_type:
            form = node.op_type[node.op_type.index("Int") :]
            constants = [array for array in held if array is not None and array.ndim > 2][:3]
            experts = range(attributes["num_experts"]) if "num_experts" in attributes else [...]
            parts = [[array[expert] for array in constants] for expert in experts]
            group, num_in = attributes.get("group", 32), attributes["num_in"]
            unpacked = [packing.unpack(packing.Packed(*part, group=group), form)[:num_in].T for part in parts]
            weight = np.concatenate(unpacked)
        else:
            continue
        if order is not None:
            weight = weight[:, np.argsort(order)]
        yield weight


def _from_blocks(levels: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None, **sizes: int) -> np.ndarray:
    def wide(packed: np.ndarray) -> np.ndarray:
        if sizes["bits"] == 8:
            return packed
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)

    middle = np.full_like(scales, 1 << (sizes["bits"] - 1))
    points = middle if zeros is None else wide(zeros)[:, : scales.shape[1]]
    # No product and no sum is rounded in float64; the numbers are rounded once, to float32.
    weight = (wide(levels) - points[..., None].astype(np.float64)) * scales[..., None]
    return weight.reshape(len(levels), -1)[:, : sizes["K"]]


def digests(weight: np.ndarray) -> set[bytes]:
    rows = np.ascontiguousarray(weight, np.float32)
    return {row.tobytes() for row in rows + np.float32(0) if row.any()}  # -0 and 0 are the same number
