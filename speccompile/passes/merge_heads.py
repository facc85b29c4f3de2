# SPDX-License-Identifier: Apache-2.0
"""Bring Q, K and V of a merged projection into head layout together, and rotate Q and K together.

Split -> 3 x (Reshape, Transpose) -> 2 x RotaryEmbedding becomes Reshape -> Transpose -> Split -> one RotaryEmbedding ->
Split: four nodes a layer fewer, at about 1 to 4 microseconds each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from speccompile.passes.base import as_pass
from speccompile.passes.edit import Editor, nodes_of, weight_of

TO_HEADS = (0, 2, 1, 3)  # [batch, nodes, heads, head_dim] -> [batch, heads, nodes, head_dim]


@dataclass(frozen=True)
class _Part:
    """One output of the split and its path to the head layout."""

    reshape: ir.Node
    transpose: ir.Node
    heads: int
    head_dim: int


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node, index = uses[0]
    return node if node.op_type == op_type and index == 0 else None


def _part(value: ir.Value) -> _Part | None:
    reshape = _only_user(value, "Reshape")
    if reshape is None:
        return None
    target = weight_of(reshape.inputs[1])
    transpose = _only_user(reshape.outputs[0], "Transpose")
    if target is None or transpose is None or tuple(transpose.attributes["perm"].as_ints()) != TO_HEADS:
        return None
    shape = target.numpy().tolist()
    if len(shape) != 4 or shape[:2] != [0, 0] or min(shape[2:]) <= 0:
        return None
    return _Part(reshape, transpose, shape[2], shape[3])


def _rotary(part: _Part) -> ir.Node | None:
    return _only_user(part.transpose.outputs[0], "RotaryEmbedding")


def _rotate_alike(first: ir.Node | None, second: ir.Node | None) -> bool:
    if first is None or second is None:
        return False
    return tuple(first.inputs[1:]) == tuple(second.inputs[1:]) and _attributes(first) == _attributes(second)


def _attributes(rotary: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in rotary.attributes.items() if name != "num_heads"}


@as_pass()
def merge_heads(model: ir.Model) -> int:
    """Merge the head layout of every split projection; returns how many."""
    merged = 0
    for split in nodes_of(model, "Split"):
        axis = split.attributes.get("axis")
        parts = [_part(value) for value in split.outputs]
        whole = [p for p in parts if p is not None]
        if axis is None or axis.as_int() != -1 or len(whole) != len(parts) or len({p.head_dim for p in whole}) != 1:
            continue
        _merge(model, split, whole)
        merged += 1
    return merged


def _merge(model: ir.Model, split: ir.Node, parts: list[_Part]) -> None:
    edit = Editor(model, split)
    total = sum(p.heads for p in parts)
    heads = edit.op("Reshape", split.inputs[0], edit.ints([0, 0, total, parts[0].head_dim]))
    heads = edit.op("Transpose", heads, perm=TO_HEADS)
    rotaries = [_rotary(p) for p in parts]
    sizes = [p.heads for p in parts]
    if len(parts) == 3 and rotaries[2] is None and _rotate_alike(rotaries[0], rotaries[1]):
        first, second = rotaries[0], rotaries[1]
        assert first is not None and second is not None
        later = Editor(model, first)  # positions are known here
        both, values = edit.op("Split", heads, edit.ints([sizes[0] + sizes[1], sizes[2]]), axis=1, num_outputs=2)
        both = later.op("RotaryEmbedding", both, *first.inputs[1:], **_attributes(first))
        query, key = later.op("Split", both, later.ints(sizes[:2]), axis=1, num_outputs=2)
        replaced = [(first.outputs[0], query), (second.outputs[0], key), (parts[2].transpose.outputs[0], values)]
        dead = [first, second]
    else:
        outputs = edit.op("Split", heads, edit.ints(sizes), axis=1, num_outputs=len(parts))
        replaced = [(p.transpose.outputs[0], out) for p, out in zip(parts, outputs, strict=True)]
        dead = []
    for old, new in replaced:
        new.shape, new.type = old.shape, old.type
        old.replace_all_uses_with(new)
    dead += [node for p in parts for node in (p.transpose, p.reshape)] + [split]
    for node in dead:
        model.graph.remove(node, safe=True)
