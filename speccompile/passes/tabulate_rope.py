# SPDX-License-Identifier: Apache-2.0
"""cos(position * frequencies) -> a row of a table that is computed once, at build time.

Five nodes fewer in every step: RotaryEmbedding reads the tables [max_seq_len, rotary_dim / 2] by position.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor, replace
from speccompile.passes.fuse_rope import ROPE_FUSED
from speccompile.passes.match import constant, ints


def _evaluate(value: ir.Value, max_seq_len: int) -> tuple[ir.Value, np.ndarray] | None:
    """Returns (positions, table) where `value` [batch, nodes, n] is row `positions` [batch, nodes] of the table.

    The chain is followed upwards through elementwise operators and constants in float32, as in the graph.
    """
    node = value.producer()
    if value.dtype == ir.DataType.INT64 and value.shape is not None and len(value.shape) == 2:
        return value, np.arange(max_seq_len)
    if node is None or node.domain != "" or node.inputs[0] is None:
        return None
    if node.op_type == "Mul":
        for index in (0, 1):
            operand, factor = node.inputs[index], constant(node.inputs[1 - index])
            if operand is not None and factor is not None and factor.ndim <= 3:
                found = _evaluate(operand, max_seq_len)
                if found is not None and (factor.ndim < 2 or factor.size == factor.shape[-1]):
                    return found[0], found[1] * factor.reshape(-1)
        return None
    found = _evaluate(node.inputs[0], max_seq_len)
    if found is None:
        return None
    positions, table = found
    if node.op_type == "Unsqueeze" and ints(node.inputs[1]) in ([2], [-1]):
        return positions, table[:, None]
    if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT:
        return positions, table.astype(np.float32)
    if node.op_type in ("Cos", "Sin"):
        # float64 inside: the float32 angle is the model's own, so its cosine is correctly rounded.
        function = np.cos if node.op_type == "Cos" else np.sin
        return positions, function(table.astype(np.float64)).astype(np.float32)
    return None


def tabulate_rope(model: ir.Model, max_seq_len: int) -> int:
    """Replace the computed angles of every RotaryEmbedding by tables; returns how many were changed."""
    tables: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    count = 0
    for node in [n for n in model.graph if n.op_type == "RotaryEmbedding" and n.domain == "" and len(n.inputs) == 3]:
        for name, value in zip(("cos", "sin"), node.inputs[1:], strict=True):
            found = None if value is None or value in tables else _evaluate(value, max_seq_len)
            if found is not None and value is not None:
                positions, table = found
                tables[value] = positions, Editor(model).const(np.ascontiguousarray(table), f"rope.{name}")
        known = [tables.get(v) for v in node.inputs[1:] if v is not None]
        if len(known) == 2 and known[0] is not None and known[1] is not None and known[0][0] is known[1][0]:
            old = node.outputs[0]
            attributes = {k: a.value for k, a in node.attributes.items()}
            new = Editor(model, node).op(
                "RotaryEmbedding", node.inputs[0], known[0][1], known[1][1], known[0][0], **attributes
            )
            new.type, new.shape = old.type, old.shape
            replace(node, new)
            count += 1
    return count


def tabulate_rope_pass(max_seq_len: int) -> Pass:
    return Pass("tabulate_rope", lambda model: tabulate_rope(model, max_seq_len), requires=(ROPE_FUSED,))
