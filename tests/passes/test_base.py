# SPDX-License-Identifier: Apache-2.0
"""The contract of a pass, before and after it runs; constants of parts, of which one exists at a time."""

import gc
import io
import logging
import weakref
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.errors import PassError, RecipeError
from speccompile.passes.base import Pass, Property, count_nodes, histogram_from_model, run_pipeline
from speccompile.passes.edit import Editor
from speccompile.passes.pipelines import onnxruntime_table
from speccompile.passes.save import PartsTensor, save_model


def make_model() -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24}, name="small")
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    graph.inputs.append(x)
    model = ir.Model(graph, ir_version=11)
    edit = Editor(model)
    y = edit.op("Neg", edit.op("Neg", x))
    graph.outputs.append(y)
    return model


HAS_NO_NEG = Property("no_neg", lambda m: "a Neg is left" if any(n.op_type == "Neg" for n in m.graph) else None)


def test_required_property_is_checked_before_the_rewrite():
    ran: list[int] = []
    entry = Pass("late", lambda m: ran.append(1) or 1, requires=(HAS_NO_NEG,))
    with pytest.raises(PassError, match=r"pass late: got before it ran: a Neg is left; expected no_neg"):
        entry(make_model())
    assert not ran


def test_ensured_property_is_checked_after_the_rewrite():
    with pytest.raises(PassError, match=r"pass lazy: got after it ran: a Neg is left; expected no_neg"):
        Pass("lazy", lambda m: 0, ensures=(HAS_NO_NEG,))(make_model())


def test_trace_counts_rewrites_and_nodes(caplog):
    def drop(model: ir.Model) -> int:
        nodes = list(model.graph)
        model.graph.outputs[0] = model.graph.inputs[0]
        for node in reversed(nodes):
            model.graph.remove(node)
        return len(nodes)

    model = make_model()
    assert histogram_from_model(model) == {"Neg": 2}
    with caplog.at_level(logging.DEBUG, "speccompile.passes"):
        (trace,) = run_pipeline(model, [Pass("drop", drop, ensures=(HAS_NO_NEG,))])
    assert caplog.messages == ["1 passes", f"drop: 2 rewrites, 2 -> 0 nodes, {trace.time_ms:.1f} ms"]
    assert (trace.num_rewrites, trace.num_nodes_before, trace.num_nodes_after) == (2, 2, 0)
    assert count_nodes(model) == 0


def test_small_constants_are_shared_and_names_stay_unique():
    model = make_model()
    edit = Editor(model)
    assert edit.ints([1, 2]) is edit.ints([1, 2])
    assert edit.ints([1, 2]) is not edit.ints([2, 1])
    first, second = edit.const(np.zeros(3, np.float32), "w"), edit.const(np.ones(3, np.float32), "w")
    assert first is not second and first.name != second.name


def test_unknown_quantisation_is_refused_by_name():
    from speccompile.core.dims import ModelDims
    from speccompile.graph_kinds.decoder import decoder_spec

    spec = decoder_spec("target", ModelDims("llama", 97, 8, 1, 2, 1, 4, 64))
    with pytest.raises(RecipeError, match="int3/fp32"):
        onnxruntime_table(spec, "int3", "fp32")


def test_writing_weights_is_told_by_how_many_are_done(tmp_path):
    """Weights are cast and quantised while they are written: on a wide model that takes longer than all passes."""
    model, told = make_model(), list[str]()
    edit = Editor(model)
    for number in range(3):
        edit.const(np.full(1024, number, np.float32), f"w{number}")
    save_model(model, tmp_path / "graph.onnx", told.append)
    assert told == [f"write weights {done}/3" for done in range(3)]


TYPES = (ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.UINT8, ir.DataType.INT4)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
def test_what_is_written_is_the_whole(dtype):
    whole = np.arange(-24, 24).reshape(3, 2, 8).astype(np.int8 if dtype == ir.DataType.UINT8 else np.float32)
    whole = (whole % 8).astype(dtype.numpy())
    tensor = PartsTensor(lambda: (part.T for part in whole.transpose(0, 2, 1)), dtype, whole.shape, "w")
    file = io.BytesIO()
    tensor.tofile(file)
    assert file.getvalue() == tensor.tobytes() == ir.tensor(whole, dtype=dtype).tobytes()
    assert np.array_equal(tensor.numpy(), whole) and tensor.nbytes == len(file.getvalue())


def test_one_part_exists_at_a_time():
    held: list[weakref.ref[np.ndarray]] = []

    def parts() -> Iterator[np.ndarray]:
        for number in range(4):
            gc.collect()
            assert sum(part() is not None for part in held) <= 1
            part = np.full((2, 3), number, np.float32)
            held.append(weakref.ref(part))
            yield part

    PartsTensor(parts, ir.DataType.FLOAT, (4, 2, 3), "w").tofile(io.BytesIO())
    assert len(held) == 4
