# SPDX-License-Identifier: Apache-2.0
"""Runs TensorRT's form of a decoder under ONNX Runtime's CPU provider: in float32, or with every value rounded.

A graph in float16 or bfloat16 is turned into one in float32 that rounds each result to the half type: what a GPU
does, which accumulates in float32 and writes halves. ONNX Runtime alone has no bfloat16 kernels on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.core import specs
from speccompile.core.dims import ModelDims
from speccompile.graph_kinds.decoder import decoder_spec
from speccompile.ops.registry import attach_functions
from speccompile.passes.base import Pass, run_pipeline
from speccompile.passes.lower_attention_tensorrt import LOWER_ATTENTION_TENSORRT
from speccompile.passes.pipelines import tensorrt_table
from tests.export.harness import mask_from_parents
from tests.lab.graphs import open_session

HALVES = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


def lowered(
    graph: ir.Model,
    dims: ModelDims,
    dtype: str,
    max_rows: int,
    quantization: str = "none",
    attention: Pass = LOWER_ATTENTION_TENSORRT,
    **outputs: object,
) -> ir.Model:
    """The graph as TensorRT gets it, logits out."""
    spec = tensorrt_spec(decoder_spec("target", dims, **outputs), dtype, max_rows)
    work = graph.clone()
    run_pipeline(work, tensorrt_table(spec, quantization, dtype=dtype, attention=attention))
    return work


def emulated(model: ir.Model) -> ir.Model:
    """A float32 graph that rounds where `model` computes in half precision."""
    # Inference sets the type of every value, those of the lowering included.
    work = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model), strict_mode=True))
    for value in [*work.graph.initializers.values(), *work.graph.inputs]:
        if value.dtype in HALVES:
            value.type = ir.TensorType(ir.DataType.FLOAT)
            if value.const_value is not None:
                value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    for node in list(work.graph):
        for out in node.outputs:
            assert out.dtype is not None, f"{node.op_type}: type not inferred"
            if out.dtype in HALVES:
                round_output(work, node, out)
    return work


def round_output(model: ir.Model, node: ir.Node, out: ir.Value) -> None:
    """Make `out` float32 and give its users the number rounded to the half type that it had."""
    if node.op_type == "Cast":
        node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
    uses, half = list(out.uses()), out.dtype
    down = ir.Node("", "Cast", [out], ir.convenience.convert_attributes({"to": half}))
    up = ir.Node("", "Cast", down.outputs, ir.convenience.convert_attributes({"to": ir.DataType.FLOAT}))
    model.graph.insert_after(node, [down, up])
    rounded = up.outputs[0]
    rounded.type, rounded.shape = ir.TensorType(ir.DataType.FLOAT), out.shape
    out.type = ir.TensorType(ir.DataType.FLOAT)
    for user, index in uses:
        user.replace_input_with(index, rounded)
    for position, output in enumerate(model.graph.outputs):
        if output is out:
            rounded.name, out.name = out.name, f"{out.name}.exact"
            model.graph.outputs[position] = rounded


def session_of(model: ir.Model) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    # Casts down and up again would be removed.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return open_session(model, options=options)


def neutral_session(graph: ir.Model) -> ort.InferenceSession:
    """The neutral graph with its function bodies: the float32 reference."""
    work = graph.clone()
    attach_functions(work)
    return session_of(work)


@dataclass
class Stepper:
    """A session with its caches.

    Args:
        session: of a neutral graph, or of one in TensorRT's form.
        caches: by name.
        spare_rows: for TensorRT's form: rows attended to beyond those in use.
    """

    session: ort.InferenceSession
    caches: dict[str, np.ndarray]
    spare_rows: int = 0

    @classmethod
    def of(cls, session: ort.InferenceSession, dims: ModelDims, batch: int, rows: int, spare_rows: int = 0) -> Stepper:
        # Stale rows must have no effect, so they are not zero. Multiples of 1/8 are exact in every type.
        noise = np.random.default_rng(7)
        shape = (batch, dims.num_kv_heads, rows, dims.head_dim)
        names = [n for i in range(dims.num_layers) for n in specs.cache_names(i)]
        caches = {n: (noise.integers(-64, 64, shape) / 8).astype(np.float32) for n in names}
        return cls(session, caches, spare_rows)

    def step(
        self, tokens: np.ndarray, lengths: np.ndarray, parents: np.ndarray, scored: np.ndarray
    ) -> dict[str, np.ndarray]:
        """One forward pass; returns the outputs without the caches, which are kept."""
        feeds = {
            specs.TOKENS: tokens,
            specs.LENGTHS: lengths,
            specs.TREE_MASK: mask_from_parents(parents),
            specs.SCORED_NODES: scored,
            **self.caches,
        }
        if specs.KV_ROWS in {i.name for i in self.session.get_inputs()}:
            rows = int(lengths.max()) + tokens.shape[1] + self.spare_rows
            feeds[specs.KV_ROWS] = np.zeros(min(rows, next(iter(self.caches.values())).shape[2]), np.int8)
        names = [o.name for o in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(None, feeds), strict=True))
        self.caches = {n: outputs.pop(specs.updated_cache_name(n)) for n in self.caches}
        return outputs
