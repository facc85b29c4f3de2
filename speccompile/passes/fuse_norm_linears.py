# SPDX-License-Identifier: Apache-2.0
"""Add, RMSNormalization, PackedLinear -> NormPackedLinear, whose second output is the sum (the residual stream)."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from speccompile.ops.packed_linear import PACKED_LINEARS
from speccompile.passes.base import as_pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, weight_of
from speccompile.passes.match import int_attribute, only_use, producer, rank, static_dim

# Ops without a norm before, and the op with one.
_WITH_NORM = {op.name: f"Norm{op.name}" for op in PACKED_LINEARS if not op.name.startswith("Norm")}


@dataclass(frozen=True)
class _Match:
    add: ir.Node
    norm: ir.Node
    linear: ir.Node


def _is_sum(add: ir.Node | None, size: int) -> bool:
    if add is None or len(add.inputs) != 2:
        return False
    dims = [value.shape for value in (*add.inputs, add.outputs[0]) if value is not None]
    known = [tuple(d) for d in dims if d is not None]
    is_computed = all(value is not None and weight_of(value) is None for value in add.inputs)
    return is_computed and len(known) == 3 and len(set(known)) == 1 and known[0][-1] == size


def add_before(norm: ir.Node) -> ir.Node | None:
    """Returns the residual's Add whose sum an RMSNormalization reads, if our kernels can take both as one."""
    source, gamma = norm.inputs[0], weight_of(norm.inputs[1])
    size = static_dim(source, -1)
    axis, stash = int_attribute(norm, "axis", -1), int_attribute(norm, "stash_type", 1)
    if size is None or gamma is None or tuple(gamma.shape) != (size,) or gamma.dtype != ir.DataType.FLOAT:
        return None
    if axis not in (-1, (rank(source) or 0) - 1) or stash != 1:
        return None
    add = producer(source, "Add")
    return add if add is not None and _is_sum(add, size) else None


def _match(linear: ir.Node) -> _Match | None:
    norm = producer(linear.inputs[0], "RMSNormalization")
    if norm is None or only_use(norm.outputs[0]) is not linear or (add := add_before(norm)) is None:
        return None
    return _Match(add, norm, linear)


def epsilon_of(norm: ir.Node) -> float:
    epsilon = norm.attributes.get("epsilon")
    return 1e-5 if epsilon is None else epsilon.as_float()


def _fuse(model: ir.Model, match: _Match) -> None:
    add, norm, linear = match.add, match.norm, match.linear
    attributes = {name: attribute.value for name, attribute in linear.attributes.items()}
    attributes["epsilon"] = epsilon_of(norm)
    # Readers of the sum may come before the linear, so the fused node stands where the sum was made.
    inputs = (*add.inputs, norm.inputs[1], *linear.inputs[1:])
    name = _WITH_NORM[linear.op_type]
    y, total = Editor(model, add).op(name, *inputs, domain=OPS_DOMAIN, num_outputs=2, **attributes)
    for old, new in ((linear.outputs[0], y), (add.outputs[0], total)):
        new.type, new.shape = old.type, old.shape
    for node, new in ((linear, y), (norm, None), (add, total)):
        _replace(model, node, new)


def _replace(model: ir.Model, node: ir.Node, new: ir.Value | None) -> None:
    old = node.outputs[0]
    if new is not None:
        for position, output in enumerate(model.graph.outputs):
            if output is old:
                new.name = old.name
                model.graph.outputs[position] = new
        old.replace_all_uses_with(new)
    model.graph.remove(node, safe=True)


@as_pass()
def fuse_norm_linears(model: ir.Model) -> int:
    """Fuse every such norm; returns their number."""
    candidates = [n for n in model.graph if n.domain == OPS_DOMAIN and n.op_type in _WITH_NORM]
    count = 0
    for linear in candidates:
        match = _match(linear)
        if match is not None:
            _fuse(model, match)
            count += 1
    return count
