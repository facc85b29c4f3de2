# SPDX-License-Identifier: Apache-2.0
"""Merge linears that read the same input into one MatMul and a Split: QKV, gate and up.

One product quantises its input once and synchronises threads once. Where a graph runs the same layers several times,
all runs read one merged weight; a run that needs only some of its parts computes all of them. A linear whose product is
an output of the graph stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import as_pass
from speccompile.passes.edit import Editor, sizes_of, weight_of

_Weights = tuple[ir.Value, ...]


@dataclass(frozen=True)
class _Group:
    """Linears of one input, and all weights of the merged product, of which some may have no linear here."""

    source: ir.Value
    nodes: dict[ir.Value, ir.Node]  # by weight
    weights: _Weights


@as_pass()
def merge_linears(model: ir.Model) -> int:
    """Merge MatMuls with weights [in, out] that share their input, and their biases; returns the number of groups."""
    by_source: dict[ir.Value, dict[ir.Value, ir.Node]] = defaultdict(dict)
    for node in model.graph:
        source, weight = (*node.inputs, None, None)[:2]
        is_linear = node.op_type == "MatMul" and node.domain == "" and _is_weight(weight)
        if is_linear and source is not None and not _gives_output(node):
            assert weight is not None
            by_source[source].setdefault(weight, node)  # the first: what reads it may come before another one
    merged = _merged_weights(by_source)
    groups = [_Group(s, nodes, w) for s, nodes in by_source.items() if (w := merged.get(frozenset(nodes))) is not None]
    merger = _Merger(model)
    for group in groups:
        merger.merge(group)
    merger.remove_unused()
    return len(groups)


def _is_weight(value: ir.Value | None) -> bool:
    weight = weight_of(value)
    if weight is None or value is None or len(weight.shape) != 2:
        return False
    return all(use.node.op_type == "MatMul" and use.idx == 1 for use in value.uses())


def _gives_output(node: ir.Node) -> bool:
    found = bias_of(node)
    return node.outputs[0].is_graph_output() or (found is not None and found[0].outputs[0].is_graph_output())


def _merged_weights(by_source: dict[ir.Value, dict[ir.Value, ir.Node]]) -> dict[frozenset[ir.Value], _Weights]:
    """Returns the weights of the merged product by those that an input is multiplied with.

    Weights that other linears need in another company, or alone, are taken out of their groups: they would be copied.
    """
    while True:
        chosen: dict[frozenset[ir.Value], _Weights] = {}
        for nodes in sorted(by_source.values(), key=len, reverse=True):
            known = frozenset(nodes)
            chosen[known] = next((w for group, w in chosen.items() if known <= group), tuple(nodes))
        merged = {known: whole for known, whole in chosen.items() if len(known) > 1}
        homes: dict[ir.Value, set[_Weights]] = defaultdict(set)
        for known, whole in merged.items():
            for weight in known:
                homes[weight].add(whole)
        alone = {weight for known in chosen if len(known) == 1 for weight in known}
        unfit = alone & homes.keys() or {weight for weight, found in homes.items() if len(found) > 1}
        if not unfit:
            return merged
        for nodes in by_source.values():
            for weight in unfit & nodes.keys():
                del nodes[weight]


def bias_of(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    uses = list(node.outputs[0].uses())
    if len(uses) != 1 or uses[0][0].op_type != "Add" or node.outputs[0].is_graph_output():
        return None
    add = uses[0][0]
    bias = add.inputs[1 - uses[0][1]]
    tensor = weight_of(bias)
    return (add, bias) if bias is not None and tensor is not None and len(tensor.shape) == 1 else None


@dataclass
class _Merger:
    """Merges groups; values that are concatenated several times are concatenated once."""

    model: ir.Model
    made: dict[tuple[_Weights, int], ir.Value] = field(default_factory=dict)

    def merge(self, group: _Group) -> None:
        nodes = list(group.nodes.values())
        edit = Editor(self.model, nodes[0])
        product = edit.op("MatMul", group.source, self._concatenated(edit, group.weights, axis=1))
        product.type = nodes[0].outputs[0].type
        biases = {weight: bias_of(node) for weight, node in group.nodes.items()}
        ends, dead = {weight: node.outputs[0] for weight, node in group.nodes.items()}, nodes
        adds = {weight: found for weight, found in biases.items() if found is not None}
        if len(adds) == len(group.weights):
            parts = tuple(adds[weight][1] for weight in group.weights)
            product = edit.op("Add", product, self._concatenated(edit, parts, axis=0))
            ends, dead = {w: add.outputs[0] for w, (add, _) in adds.items()}, [add for add, _ in adds.values()] + dead
        sizes = [sizes_of(w.const_value)[1] for w in group.weights if w.const_value is not None]
        product.type = next(iter(ends.values())).type
        outputs = edit.op("Split", product, edit.ints(sizes), axis=-1, num_outputs=len(sizes))
        for weight, size, part in zip(group.weights, sizes, outputs, strict=True):
            end = ends.get(weight)
            part.type = product.type
            if end is not None:
                part.shape = end.shape
                end.replace_all_uses_with(part)
            elif (known := nodes[0].outputs[0].shape) is not None:
                part.shape = ir.Shape([*known.dims[:-1], size])
        for node in dead:
            self.model.graph.remove(node, safe=True)

    def remove_unused(self) -> None:
        for values, _ in self.made:
            for value in dict.fromkeys(values):  # biases of zeros may be one value
                if value.name in self.model.graph.initializers and not value.uses():
                    del self.model.graph.initializers[str(value.name)]

    def _concatenated(self, edit: Editor, values: _Weights, axis: int) -> ir.Value:
        if (values, axis) in self.made:
            return self.made[values, axis]
        tensors = [v.const_value for v in values if v.const_value is not None]
        shape = list(sizes_of(tensors[0]))
        shape[axis] = sum(sizes_of(t)[axis] for t in tensors)
        name = "+".join(str(v.name) for v in values)

        def concat() -> ir.TensorProtocol:
            return ir.tensor(np.concatenate([t.numpy() for t in tensors], axis=axis))

        self.made[values, axis] = edit.const(ir.LazyTensor(concat, tensors[0].dtype, ir.Shape(shape), name=name), name)
        return self.made[values, axis]
