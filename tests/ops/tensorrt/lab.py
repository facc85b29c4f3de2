# SPDX-License-Identifier: Apache-2.0
"""One-node models with bodies for TensorRT, and plans of them where TensorRT-RTX is installed."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from speccompile.ops.op import DOMAIN, OPSET, VERSION
from speccompile.ops.registry import OPS, attach_functions
from speccompile.ops.tensorrt.bodies import tensorrt_ops
from tests.rtx import load_rtx

TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
}
Shape = tuple[int, ...]


def body_model(
    name: str, pins: Mapping[str, int], *, max_nodes: int = 16, dtypes: Mapping[str, str] | None = None
) -> onnx.ModelProto:
    """A model of one node; `pins` makes named dims static, `dtypes` replaces dtypes of inputs and outputs."""
    op = OPS[name] if name in OPS else tensorrt_ops("both", max_nodes)[name]
    outputs = tensorrt_ops("both", max_nodes)[name].outputs

    def values(tensors: Any) -> list[onnx.ValueInfoProto]:
        kinds = {t.name: (dtypes or {}).get(t.name, t.dtype) for t in tensors}
        return [
            helper.make_tensor_value_info(t.name, TYPES[kinds[t.name]], [pins.get(d, d) for d in t.dims])
            for t in tensors
        ]

    node = helper.make_node(name, [t.name for t in op.inputs[:8]], [t.name for t in outputs], domain=DOMAIN)
    graph = helper.make_graph([node], name, values(op.inputs[:8]), values(outputs))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=11))
    attach_functions(model, dialect="tensorrt", max_nodes=max_nodes)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def random_feeds(vocab: int, batch: int, seed: int) -> dict[str, np.ndarray]:
    """logits [batch, 2, vocab] with ties in some rows, and warps of every kind."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(batch, 2, vocab)) * rng.choice([0.1, 3.0], size=(batch, 1, 1))).astype(np.float32)
    ties = rng.random(batch) < 0.3
    logits[ties] = np.round(logits[ties] * 2)
    return {
        "logits": logits,
        "temperature": (rng.integers(0, 4, batch) * 0.5).astype(np.float32),
        "top_k": rng.integers(0, 2, batch) * rng.integers(1, vocab + 3, batch),
        "top_p": np.where(rng.random(batch) < 0.4, 1, rng.uniform(0.05, 1, batch)).astype(np.float32),
    }


class Parsed:
    """Builds a model with TensorRT-RTX: returns layer kinds of the parsed network, and the plan."""

    def __init__(self, model: onnx.ModelProto, profile: Mapping[str, tuple[Shape, Shape, Shape]]) -> None:
        variant = load_rtx()
        trt = variant.trt
        builder = trt.Builder(variant.logger)
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, variant.logger)
        assert parser.parse(model.SerializeToString()), [parser.get_error(i).desc() for i in range(parser.num_errors)]
        self.kinds = [str(network.get_layer(i).type).rpartition(".")[2] for i in range(network.num_layers)]
        config, shapes = builder.create_builder_config(), builder.create_optimization_profile()
        for name, row in profile.items():
            shapes.set_shape(name, *row)
        config.add_optimization_profile(shapes)
        plan = builder.build_serialized_network(network, config)
        assert plan is not None, list(variant.logger.lines)[-5:]
        self.plan_bytes = plan.nbytes
