# SPDX-License-Identifier: Apache-2.0
"""What else our CPU kernels do beside a LowRank: the gate after it becomes part of it, the norm before it an AddNorm.

NormPackedLinear and GatedPackedLinear do not match there: the LowRank stands between linear and gate, and reads the
norm too.
"""

from __future__ import annotations

import onnx_ir as ir

from speccompile.passes.base import as_pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, nodes_of, replace
from speccompile.passes.fuse_norm_linears import add_before, epsilon_of
from speccompile.passes.gates import gate_of
from speccompile.passes.match import producer, replace_tree, static_dim


@as_pass()
def fuse_low_rank(model: ir.Model) -> int:
    """Fuses every such gate and norm; returns their number."""
    return sum(_fuse_norm(model, node) + _fuse_gate(model, node) for node in nodes_of(model, "LowRank", OPS_DOMAIN))


def _fuse_gate(model: ir.Model, node: ir.Node) -> int:
    y = node.outputs[0]
    gate = gate_of(y, static_dim(y, 2) or 1, num_dims=3)
    if gate is None or gate.is_second:
        return 0
    edit = Editor(model, gate.last)
    out = edit.op("GatedLowRank", *node.inputs, domain=OPS_DOMAIN, activation=gate.activation)
    out.type, out.shape = gate.last.outputs[0].type, gate.last.outputs[0].shape
    replace_tree(gate.last, out)
    return 1


def _fuse_norm(model: ir.Model, node: ir.Node) -> int:
    norm = producer(node.inputs[1], "RMSNormalization")
    add = None if norm is None else add_before(norm)
    if norm is None or add is None:
        return 0
    inputs, attributes = (*add.inputs, norm.inputs[1]), {"epsilon": epsilon_of(norm)}
    y, total = Editor(model, add).op("AddNorm", *inputs, domain=OPS_DOMAIN, num_outputs=2, **attributes)
    for old, new in ((norm.outputs[0], y), (add.outputs[0], total)):
        new.type, new.shape = old.type, old.shape
    replace(norm, y)
    replace(add, total)
    return 1
