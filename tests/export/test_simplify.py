# SPDX-License-Identifier: Apache-2.0
"""A traced graph is simplified, its function stays, and no rule walks the graph at every node."""

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from speccompile.export.trace import RULES, simplify
from speccompile.ops.op import OPSET


def redundant_model() -> ir.Model:
    """Returns ((x * 1 transposed twice) as float32 + (2 + 3)) cut into its halves."""

    def value(name: str, size: int = 4) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, size]))

    def op(kind: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        node = ir.node(kind, inputs, attributes or None)
        nodes.append(node)
        return node.outputs[0]

    nodes: list[ir.Node] = []
    x, low, high = value("x"), value("low", 2), value("high", 2)
    ints = [op("Constant", value_ints=[number]) for number in (0, 2, 4, 1)]
    one, two, three = (op("Constant", value_float=number) for number in (1.0, 2.0, 3.0))
    y = op("Transpose", op("Transpose", op("Mul", x, one), perm=[1, 0]), perm=[1, 0])
    y = op("Cast", y, to=ir.DataType.FLOAT.value)
    y = op("Add", y, op("Add", two, three))
    op("Neg", y)  # nobody reads it
    start, middle, end, axis = ints
    nodes.append(ir.Node("", "Slice", [y, start, middle, axis], outputs=[low]))
    nodes.append(ir.Node("", "Slice", [y, middle, end, axis], outputs=[high]))
    return ir.Model(ir.Graph([x], [low, high], nodes=nodes, opset_imports={"": OPSET}), ir_version=12)


def run(model: ir.Model, x: np.ndarray) -> list[np.ndarray]:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


def test_no_ops_and_unused_nodes_go_constants_are_folded_and_results_stay():
    model, x = redundant_model(), np.arange(8, dtype=np.float32).reshape(2, 4)
    before = run(model, x)
    simplify(model)
    assert Counter(node.op_type for node in model.graph) == {"Add": 1, "Slice": 2}
    for got, wanted in zip(run(model, x), before, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_every_rule_ends_in_one_node():
    """With more of them, onnxscript compares every node with all others: time grows with the square of the nodes."""
    assert [rule for rule in RULES if not rule._target_pattern.has_single_output_node] == []
