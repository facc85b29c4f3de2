# SPDX-License-Identifier: Apache-2.0
"""Convert weights, activations, caches and hidden states to float16 or bfloat16.

TensorRT computes in the types that the graph names; matrix products accumulate in float32 anyway. Norms, rotary
embeddings and softmax are wrapped in casts to float32, which TensorRT fuses into the adjacent kernel.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.core.specs import GraphSpec
from speccompile.errors import PassError
from speccompile.passes.base import Pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, sizes_of

# Computed in float32: sums of squares overflow float16 and lose digits in bfloat16; so do angles.
FLOAT32_OPS = ("RMSNormalization", "LayerNormalization", "RotaryEmbedding", "Softmax")
# Read logits in any float type and keep the distributions to sample from in float32.
TAIL_OPS = ("SpecVerify", "FiniteToken", "SampleToken", "TopTokens", "NodeProbs")
# Keep their states and sums in float32 whatever type the rows have; by op: the input whose type the output has.
STATE_OPS = {"GatedDelta": 2, "ConvRows": 0}
# Their inputs that are computed in float32, back to the products and parts of rows that they are made of: keys,
# queries and gates, whose errors stay in the state for as long as it decays.
_EXACT_INPUTS = {"GatedDelta": (0, 1, 3, 4), "ConvRows": ()}
_ENDS = ("MatMul", "Gemm", "ConvRows", "Split", "Slice", "Gather", "TensorScatter")
_FLOAT = ir.DataType.FLOAT


def half_array(array: np.ndarray, dtype: ir.DataType, name: str) -> np.ndarray:
    """Returns `array` rounded to `dtype`. Raises PassError: a number is beyond float16's range."""
    with np.errstate(over="ignore"):
        rounded = array.astype(dtype.numpy())
    if dtype == ir.DataType.FLOAT16 and not np.isfinite(rounded).all() and np.isfinite(array).all():
        got = f"a weight of magnitude {np.abs(array).max():g}"
        raise PassError(f"half_precision: {name}", got, "at most 65504, float16's largest", "Use dtype: bfloat16.")
    return rounded


def _retype(value: ir.Value, dtype: ir.DataType, shape: ir.Shape | None) -> None:
    value.type, value.shape = ir.TensorType(dtype), shape


def _is_computed(value: ir.Value) -> bool:
    return value.is_graph_input() or not value.is_initializer()


class _Converter:
    def __init__(self, model: ir.Model, dtype: ir.DataType) -> None:
        self.model, self.dtype = model, dtype
        self.weights: dict[ir.Value, ir.Value] = {}
        self.widened: dict[ir.Value, ir.Value] = {}

    def weight(self, value: ir.Value) -> ir.Value:
        """Returns the half-precision copy of a float32 initializer; rounded only while it is written."""
        if value not in self.weights:
            tensor, name = value.const_value, str(value.name)
            assert tensor is not None
            if tensor.size <= 64:
                held: ir.TensorProtocol = ir.tensor(half_array(tensor.numpy(), self.dtype, name), name=name)
            else:

                def rounded(tensor: ir.TensorProtocol = tensor, name: str = name) -> ir.TensorProtocol:
                    return ir.tensor(half_array(tensor.numpy(), self.dtype, name), name=name)

                held = ir.LazyTensor(rounded, self.dtype, ir.Shape(sizes_of(tensor)), name=name)
            self.weights[value] = Editor(self.model).const(held, f"{name}.{self.dtype.name.lower()}")
        return self.weights[value]

    def widen(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """Returns `value` in float32 for the operator `node`; shared by the operators that read it."""
        if value.dtype != self.dtype:
            return value
        if value not in self.widened:
            cast = Editor(self.model, node).op("Cast", value, to=_FLOAT)
            _retype(cast, _FLOAT, value.shape)
            self.widened[value] = cast
        return self.widened[value]

    def island(self, node: ir.Node) -> None:
        """Wrap a float32 operator in casts."""
        for index, value in enumerate(node.inputs):
            if value is not None and _is_computed(value):
                node.replace_input_with(index, self.widen(value, node))
        for out in [o for o in node.outputs if o.dtype == _FLOAT]:
            uses = list(out.uses())
            cast = ir.Node("", "Cast", [out], ir.convenience.convert_attributes({"to": self.dtype}))
            self.model.graph.insert_after(node, cast)
            half = cast.outputs[0]
            _retype(half, self.dtype, out.shape)
            for user, index in uses:
                user.replace_input_with(index, half)
            for position, output in enumerate(self.model.graph.outputs):
                if output is out:
                    half.name, out.name = out.name, f"{out.name}.float32"
                    self.model.graph.outputs[position] = half

    def keep(self, node: ir.Node) -> None:
        """Keep an operator on draws, temperatures or distributions in float32."""
        for index, value in enumerate(node.inputs):
            if value is not None and _is_computed(value):
                node.replace_input_with(index, self.widen(value, node))

    def plain(self, node: ir.Node) -> None:
        """Convert any other operator: float32 becomes half."""
        for index, value in enumerate(node.inputs):
            if value is not None and value.is_initializer() and value.dtype == _FLOAT:
                node.replace_input_with(index, self.weight(value))
        if node.op_type == "Cast" and node.attributes["to"].as_int() == _FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", self.dtype)
        held = node.attributes.get("value")
        if held is not None and held.type == ir.AttributeType.TENSOR and held.as_tensor().dtype == _FLOAT:
            array = half_array(held.as_tensor().numpy(), self.dtype, str(node.name))
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(array))
        for out in node.outputs:
            if out.dtype == _FLOAT:
                _retype(out, self.dtype, out.shape)


def _exact_nodes(model: ir.Model) -> set[ir.Node]:
    ops = [n for n in model.graph if n.domain == OPS_DOMAIN and n.op_type in STATE_OPS]
    left, found = [n.inputs[i] for n in ops for i in _EXACT_INPUTS[n.op_type]], set[ir.Node]()
    while left:
        value = left.pop()
        maker = None if value is None else value.producer()
        if maker is not None and maker not in found and maker.op_type not in _ENDS:
            found.add(maker)
            left += maker.inputs
    return found


def _check_angles(model: ir.Model, dtype: ir.DataType) -> None:
    """Refuse computed angles: positions beyond 2048 (256 in bfloat16) have no exact half, so angles must be tables."""
    for node in model.graph:
        if node.op_type in ("Cos", "Sin") and node.domain == "":
            got = f"{node.op_type} node {node.name} that computes angles at run time"
            todo = "Build with dtype: float32, or report the model's config."
            raise PassError(f"half_precision to {dtype.name.lower()}", got, "rotary tables", todo)


def convert_precision(model: ir.Model, spec: GraphSpec, dtype: str) -> int:
    """Converts a float32 model with its tail in place; returns the number of operators that then compute in `dtype`."""
    half = ir.DataType[dtype.upper()]
    _check_angles(model, half)
    halves = {t.name for t in (*spec.inputs, *spec.outputs) if t.dtype == dtype}
    for value in model.graph.inputs:
        if value.name in halves:
            _retype(value, half, value.shape)
    converter, count, exact = _Converter(model, half), 0, _exact_nodes(model)
    for node in list(model.graph):
        if node.domain == OPS_DOMAIN and node.op_type in TAIL_OPS:
            continue
        if node.domain == OPS_DOMAIN and node.op_type in STATE_OPS:
            row = node.inputs[STATE_OPS[node.op_type]]
            assert row is not None and row.dtype is not None
            _retype(node.outputs[0], row.dtype, node.outputs[0].shape)
            continue
        if node in exact:
            converter.keep(node)
            continue
        if node.domain == "" and node.op_type in FLOAT32_OPS:
            converter.island(node)
            continue
        if any(_is_computed(v) and v.dtype == _FLOAT for v in node.inputs if v is not None):
            converter.keep(node)
            continue
        count += any(o.dtype == _FLOAT for o in node.outputs)
        converter.plain(node)
    for position, value in enumerate(model.graph.outputs):
        if value.dtype == half and value.name not in halves:  # logits, scores
            name = value.name
            value.name = f"{name}.{dtype}"
            cast = Editor(model).op("Cast", value, to=_FLOAT)
            cast.name = name
            _retype(cast, _FLOAT, value.shape)
            model.graph.outputs[position] = cast
    return count


def half_precision_pass(spec: GraphSpec, dtype: str) -> Pass:
    """Returns the pass to `dtype`; see `convert_precision`."""
    return Pass(f"half_precision_{dtype}", lambda model: convert_precision(model, spec, dtype))
