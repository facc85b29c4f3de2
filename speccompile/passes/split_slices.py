# SPDX-License-Identifier: Apache-2.0
"""Merge Slices that cut one tensor into adjacent parts into one Split (a fused QKV projection)."""

from __future__ import annotations

from collections import defaultdict

import onnx_ir as ir

from speccompile.passes.base import as_pass
from speccompile.passes.edit import Editor, replace
from speccompile.passes.match import slice_bounds, static_dim


@as_pass()
def split_slices(model: ir.Model) -> int:
    """Replace each group of Slices that covers its input exactly; returns the number of groups."""
    groups: dict[tuple[ir.Value, int], list[tuple[int, int, ir.Node]]] = defaultdict(list)
    for node in model.graph:
        bounds = slice_bounds(node) if node.op_type == "Slice" and node.domain == "" else None
        if bounds is not None and node.inputs[0] is not None:
            axis, start, end = bounds
            groups[node.inputs[0], axis].append((start, end, node))
    count = 0
    for (source, axis), parts in groups.items():
        order = sorted(parts, key=lambda part: part[0])
        edges = [0, *(end for _, end, _ in order)]
        if len(order) < 2 or [start for start, _, _ in order] != edges[:-1] or edges[-1] != static_dim(source, axis):
            continue
        first = next(n for n in model.graph if any(n is part[2] for part in parts))
        edit = Editor(model, first)
        sizes = edit.ints([end - start for start, end, _ in order])
        outputs = edit.op("Split", source, sizes, axis=axis, num_outputs=len(order))
        for (_, _, node), value in zip(order, outputs, strict=True):
            value.type, value.shape = node.outputs[0].type, node.outputs[0].shape
            replace(node, value)
        count += 1
    return count
