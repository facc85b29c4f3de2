# SPDX-License-Identifier: Apache-2.0
"""Caches become int8 rows with scales: in our attention ops, and in attention that was lowered to standard ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import numpy as np
import onnx_ir as ir

from speccompile.core.dims import INT8_CACHE_GROUP
from speccompile.core.specs import Dim, GraphSpec, updated_cache_name
from speccompile.errors import PassError
from speccompile.graph_kinds.int8_caches import int8_cache_names, scale_dims, scale_name
from speccompile.ops.int8_caches import INT8_ATTENTION, QUANTIZE_ROWS
from speccompile.passes.base import Pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, add_input, replace

_LEVELS = ir.TensorType(ir.DataType.INT8)
_FLOAT = ir.TensorType(ir.DataType.FLOAT)


def _scale_dims(cache: ir.Value) -> tuple[Dim, ...]:
    assert cache.shape is not None
    return scale_dims([dim if isinstance(dim, int) else str(dim) for dim in cache.shape])


class _Quantizer:
    """Rewrites the readers and writers of caches; `scales` are of all values that are int8 rows."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.scales: dict[ir.Value, ir.Value] = {}
        self._floats: dict[ir.Value, ir.Value] = {}

    def add_cache(self, cache: ir.Value) -> None:
        position = self.model.graph.inputs.index(cache)
        self.scales[cache] = add_input(
            self.model, scale_name(str(cache.name)), _scale_dims(cache), "float32", position + 1
        )
        cache.type = _LEVELS

    def rewrite(self, node: ir.Node) -> bool:
        """Rewrites a node that reads or writes such rows; returns whether it does."""
        if not any(value in self.scales for value in node.inputs if value is not None) or node.op_type == "Shape":
            return False
        if node.domain == OPS_DOMAIN:
            self._convert(node)
        elif node.op_type == "TensorScatter" and node.inputs[0] in self.scales:
            self._write(node)
        else:
            self._read(node)
        return True

    def _convert(self, node: ir.Node) -> None:
        op = INT8_ATTENTION.get(node.op_type)
        if op is None:
            todo = "Report it with the recipe, and leave engine.kv_cache out."
            raise PassError(f"node {node.op_type}", "a reader of int8 caches", "an attention op", todo)
        inputs: list[ir.Value | None] = []
        for value in node.inputs:
            inputs += [value, self.scales[value]] if value is not None and value in self.scales else [value]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        num = len(op.outputs)
        made = Editor(self.model, node).op(op.name, *inputs, domain=OPS_DOMAIN, num_outputs=num, **attributes)
        out, *updated = made if num > 1 else [made]
        levels, scales = updated[::2], updated[1::2]
        for old, new in zip(node.outputs, (out, *levels), strict=True):
            new.type, new.shape = old.type, old.shape
        replace(node, out, *levels)
        self._keep(levels, scales)

    def _write(self, node: ir.Node) -> None:
        cache, rows, lengths = node.inputs
        assert cache is not None
        edit = Editor(self.model, node)
        levels, scales = edit.op(QUANTIZE_ROWS.name, rows, domain=OPS_DOMAIN, num_outputs=2)
        all_levels = edit.op("TensorScatter", cache, levels, lengths, axis=2, mode="linear")
        all_scales = edit.op("TensorScatter", self.scales[cache], scales, lengths, axis=2, mode="linear")
        all_levels.shape = cache.shape
        replace(node, all_levels)
        self._keep([all_levels], [all_scales])

    def _keep(self, levels: list[ir.Value], scales: list[ir.Value]) -> None:
        for value, scale in zip(levels, scales, strict=True):
            value.type, scale.type = _LEVELS, _FLOAT
            scale.shape = None if value.shape is None else ir.Shape(_scale_dims(value))
            self.scales[value] = scale

    def _read(self, node: ir.Node) -> None:
        for index, value in enumerate(node.inputs):
            if value is None or value not in self.scales:
                continue
            if value not in self._floats:
                edit = Editor(self.model, node)
                levels = edit.op("Cast", value, to=ir.DataType.FLOAT)
                assert value.shape is not None
                groups = edit.const(np.arange(cast(int, value.shape[-1])) // INT8_CACHE_GROUP, f"{value.name}.groups")
                scales = edit.op("Gather", self.scales[value], groups, axis=3)
                self._floats[value] = edit.op("Mul", levels, scales)
            node.replace_input_with(index, self._floats[value])

    def add_outputs(self, names: Collection[str]) -> None:
        """Puts the updated scales after the updated caches."""
        outputs = self.model.graph.outputs
        for name in names:
            position = next((i for i, v in enumerate(outputs) if v.name == updated_cache_name(name)), None)
            if position is not None:
                scale = self.scales[outputs[position]]
                scale.name = updated_cache_name(scale_name(name))
                outputs.insert(position + 1, scale)


def quantize_caches(model: ir.Model, names: Collection[str]) -> int:
    """Makes these inputs int8 with scales, and their updates; returns how many nodes it rewrote."""
    quantizer = _Quantizer(model)
    for cache in [value for value in model.graph.inputs if value.name in names]:
        quantizer.add_cache(cache)
    count = sum(quantizer.rewrite(node) for node in list(model.graph))
    quantizer.add_outputs(names)
    return count


def int8_caches_pass(spec: GraphSpec) -> Pass:
    """Returns the pass for the caches of the neutral graph `spec` that `engine.kv_cache` is about."""
    return Pass("int8_caches", lambda model: quantize_caches(model, int8_cache_names(spec)))
