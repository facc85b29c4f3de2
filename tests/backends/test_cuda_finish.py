# SPDX-License-Identifier: Apache-2.0
"""The passes for ONNX Runtime's CUDA graphs keep a graph's function and properties."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from speccompile.backends.feeds import neutral_value, shape_from_dims
from speccompile.core import specs
from speccompile.errors import PassError
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, verified_spec
from speccompile.ops.registry import attach_functions
from speccompile.passes.base import run_pipeline
from speccompile.passes.inline_bodies import inline_bodies
from speccompile.passes.pipelines import ORT_CUDA_FINISH, onnxruntime_table
from speccompile.passes.shapes_on_device import NO_CROSSINGS, host_values, shapes_on_device
from tests.lab.graphs import open_session as session

pytestmark = pytest.mark.export


@pytest.fixture(scope="module")
def lowered(neutral):
    """role -> the target or draft with branch-free bodies."""
    model, dims = neutral

    def make(role):
        decoder = decoder_spec(role, dims)
        spec = candidate_spec(decoder, 1, dists=True) if role == "draft" else verified_spec(decoder, keep_logits=True)
        work = model.clone()
        run_pipeline(work, onnxruntime_table(spec, "none", "fp32"))
        attach_functions(work, "tensorrt", 6)
        return work, spec

    return make


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_finished_graph_gives_the_same_bits(lowered, role):
    before, spec = lowered(role)
    after = before.clone()
    traces = {t.name: t.num_rewrites for t in run_pipeline(after, ORT_CUDA_FINISH)}
    assert traces["inline_bodies"] > 1 and traces["shapes_on_device"] >= 1
    # ONNX Runtime's CUDA provider (1.31) has no Pad of int64.
    assert all(n.inputs[0].dtype.is_floating_point() for n in after.graph if n.op_type == "Pad")
    assert not after.functions and {n.op_type for n in after.graph}.isdisjoint({"If", "Loop", "Scan"})
    rng = np.random.default_rng(5)
    theirs, ours = session(before), session(after)
    for nodes, draft_vocab, heat in ((1, 1, 0.0), (5, 1, 0.7), (4, 97, 0.9)):
        sizes = {"batch": 2, "nodes": nodes, "scored": nodes, "max_seq": 128}
        sizes["draft_vocab"] = draft_vocab
        feeds = {t.name: neutral_value(t.name, shape_from_dims(t, sizes), t.dtype) for t in spec.inputs}
        feeds[specs.TOKENS] = rng.integers(0, 97, (2, nodes))
        feeds[specs.LENGTHS] = np.array([7, 20])
        feeds[specs.TEMPERATURE] = np.full(2, heat, np.float32)
        if specs.UNIFORMS in feeds:
            feeds[specs.UNIFORMS] = rng.random(feeds[specs.UNIFORMS].shape, np.float32)
        if draft_vocab > 1 and specs.DRAFT_PROBS in feeds:
            dists = rng.random((2, nodes, 97), np.float32)
            feeds[specs.DRAFT_PROBS] = dists / dists.sum(-1, keepdims=True)
        for got, wanted in zip(ours.run(None, feeds), theirs.run(None, feeds), strict=True):
            np.testing.assert_array_equal(got, wanted)


def graph_of(nodes, inputs, outputs, **initializers):
    """A model of ONNX nodes, with types and shapes inferred."""
    held = [
        helper.make_tensor(n, TensorProto.INT64, np.shape(v), np.ravel(v).tolist()) for n, v in initializers.items()
    ]
    values = [[helper.make_tensor_value_info(*row) for row in rows] for rows in (inputs, outputs)]
    graph = helper.make_graph(nodes, "g", *values, held)
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11))
    inline_bodies(model)
    return model


def test_a_number_of_a_shape_that_meets_data_goes_through_a_range():
    nodes = [
        helper.make_node("Shape", ["x"], ["size"], start=0, end=1),
        helper.make_node("Sub", ["size", "one"], ["last"]),
        helper.make_node("Gather", ["x", "last"], ["row"]),
        helper.make_node("Mul", ["x", "last"], ["scaled"]),
        helper.make_node("Expand", ["one", "size"], ["ones"]),
        helper.make_node("Greater", ["size", "one"], ["is_long"]),
        helper.make_node("Where", ["is_long", "x", "scaled"], ["chosen"]),
    ]
    inputs = [("x", TensorProto.INT64, ["n"])]
    outputs = [("row", TensorProto.INT64, [1]), ("ones", TensorProto.INT64, None), ("chosen", TensorProto.INT64, ["n"])]
    model = graph_of(nodes, inputs, outputs, one=[1])
    assert {v.name for v in host_values(model)} == {"size", "last", "is_long"}
    assert NO_CROSSINGS.find_fault(model) is not None
    before, x = session(model), np.array([4, 5, 6])
    assert shapes_on_device(model) == 2  # `last` once for both of its readers; Expand takes `size` where it is
    assert [n.op_type for n in model.graph].count("Range") == 2
    for values in (x, x[:1]):
        for got, wanted in zip(session(model).run(None, {"x": values}), before.run(None, {"x": values}), strict=True):
            np.testing.assert_array_equal(got, wanted)
    assert shapes_on_device(model) == 0


def test_several_numbers_at_once_are_refused():
    nodes = [helper.make_node("Shape", ["x"], ["size"]), helper.make_node("Add", ["size", "y"], ["z"])]
    inputs = [("x", TensorProto.INT64, ["n", "m"]), ("y", TensorProto.INT64, [2])]
    model = graph_of(nodes, inputs, [("z", TensorProto.INT64, [2])])
    with pytest.raises(PassError, match=r"size .*read by Add; expected one number"):
        shapes_on_device(model)
