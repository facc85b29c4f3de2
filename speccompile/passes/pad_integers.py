# SPDX-License-Identifier: Apache-2.0
"""Pad of int64 -> Pad of double between casts: ONNX Runtime's CUDA provider (1.31) has no int64 kernel.

Node indices and tokens are exact in double. On the CPU the node would move all its consumers there as well.
"""

from __future__ import annotations

import onnx_ir as ir

from speccompile.passes.base import Pass, Property
from speccompile.passes.edit import Editor, nodes_of, replace


def _integer_pads(model: ir.Model) -> list[ir.Node]:
    return [n for n in nodes_of(model, "Pad") if n.inputs[0] is not None and n.inputs[0].dtype == ir.DataType.INT64]


def _find_integer_pad(model: ir.Model) -> str | None:
    nodes = _integer_pads(model)
    return f"{len(nodes)} Pad nodes of int64 are left" if nodes else None


INTEGERS_PADDED = Property("no Pad of int64", _find_integer_pad)


def pad_integers(model: ir.Model) -> int:
    """Rewrite every Pad of int64; returns their number. Types must be known: see `ShapeInferencePass`."""
    nodes = _integer_pads(model)
    for node in nodes:
        edit, (data, pads, *rest) = Editor(model, node), node.inputs
        fill = rest[0] if rest else None
        if fill is not None:
            rest[0] = edit.op("Cast", fill, to=ir.DataType.DOUBLE)
        mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "constant"
        padded = edit.op("Pad", edit.op("Cast", data, to=ir.DataType.DOUBLE), pads, *rest, mode=mode)
        out = edit.op("Cast", padded, to=ir.DataType.INT64)
        out.shape, out.type = node.outputs[0].shape, node.outputs[0].type
        replace(node, out)
    return len(nodes)


PAD_INTEGERS = Pass("pad_integers", pad_integers, ensures=(INTEGERS_PADDED,))
