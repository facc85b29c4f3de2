# SPDX-License-Identifier: Apache-2.0
"""Small graphs in ONNX's textual syntax, and their evaluation."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx.parser
import onnx.shape_inference
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator


def graph(text: str, weights: Mapping[str, np.ndarray] | None = None) -> ir.Model:
    """A model from the text of its graph, with shapes inferred and `weights` as initializers."""
    parsed = onnx.parser.parse_model(f'<ir_version: 11, opset_import: ["": 24]>\n{text}')
    for name, array in (weights or {}).items():
        parsed.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model = ir.from_proto(onnx.shape_inference.infer_shapes(parsed, data_prop=True))
    for name, array in (weights or {}).items():
        model.graph.initializers[name].const_value = ir.tensor(array, name=name)
    return model


def run(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs under the reference evaluator."""
    return ReferenceEvaluator(ir.to_proto(model)).run(None, dict(feeds))


class GridTable:
    """A checkpoint of grids by name, see `ops.grid.GridSource`."""

    def __init__(self, grids: Mapping[str, Any]) -> None:
        self.grids = dict(grids)

    @property
    def grid_keys(self) -> tuple[str, ...]:
        return tuple(self.grids)

    def grid(self, key: str) -> Any:
        return self.grids[key]


def ops(model: ir.Model) -> Counter[str]:
    """Nodes by operator."""
    return Counter(n.op_type for n in model.graph)
