# SPDX-License-Identifier: Apache-2.0
"""Weights that two graphs share are written once, in every graph of the one that gives up its data file."""

from pathlib import Path

import numpy as np
import pytest

from speccompile.bundle.shared_weights import ALIGNMENT, share_weights

pytest.importorskip("onnx_ir")
pytestmark = pytest.mark.export
SAME, OWN, OTHER = (np.random.default_rng(seed).random((40, 50), np.float32) for seed in range(3))


def write(file: Path, data: str, **weights: np.ndarray) -> None:
    """Writes a graph that adds weights to its input; its data file is written where there is none."""
    import onnx
    from onnx import TensorProto, external_data_helper, helper, numpy_helper

    nodes = [helper.make_node("Add", ["x", name], [f"{name}.sum"]) for name in weights]
    float32, shape = TensorProto.FLOAT, [40, 50]
    outputs = [helper.make_tensor_value_info(f"{name}.sum", float32, shape) for name in weights]
    inputs = [helper.make_tensor_value_info("x", float32, shape)]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    model = helper.make_model(helper.make_graph(nodes, "graph", inputs, outputs, tensors))
    file.parent.mkdir(exist_ok=True)
    (file.parent / data).unlink(missing_ok=True)
    external_data_helper.convert_model_to_external_data(model, location=data, size_threshold=0)
    onnx.save(model, file)


def weights_of(file: Path) -> dict[str, np.ndarray]:
    import onnx_ir as ir

    return {str(v.name): v.const_value.numpy() for v in ir.load(file).graph.initializers.values()}


def test_what_is_equal_is_written_once_for_both_graphs_of_a_draft(tmp_path: Path) -> None:
    owner, borrower = tmp_path / "target" / "graph.onnx", tmp_path / "draft" / "graph.onnx"
    write(owner, "graph.onnx.data", a=OTHER, b=SAME)
    write(borrower.with_suffix(".sequences.onnx"), "graph.onnx.data", b=SAME, c=OWN)
    write(borrower, "graph.onnx.data", b=SAME, c=OWN)
    shared, saved = share_weights(owner, borrower)
    assert saved == SAME.nbytes and not borrower.parent.exists()
    names = {"graph.onnx", "graph.onnx.data", "draft.onnx", "draft.onnx.data", "draft.sequences.onnx"}
    assert {file.name for file in owner.parent.iterdir()} == names
    for file in (shared, shared.with_suffix(".sequences.onnx")):
        held = weights_of(file)
        assert held.keys() == {"b", "c"}
        assert np.array_equal(held["b"], SAME) and np.array_equal(held["c"], OWN)
    assert (owner.parent / "draft.onnx.data").stat().st_size == OWN.nbytes
    assert all(np.array_equal(weights_of(owner)[name], array) for name, array in (("a", OTHER), ("b", SAME)))


def test_each_tensor_of_its_own_begins_at_a_page_and_without_any_there_is_no_file(tmp_path: Path) -> None:
    owner, borrower = tmp_path / "target" / "graph.onnx", tmp_path / "draft" / "graph.onnx"
    write(owner, "graph.onnx.data", b=SAME)
    write(borrower, "graph.onnx.data", c=OWN, d=OTHER)
    shared, saved = share_weights(owner, borrower)
    assert saved == 0 and np.array_equal(weights_of(shared)["d"], OTHER)
    assert (tmp_path / "target" / "draft.onnx.data").stat().st_size == -(
        -OWN.nbytes // ALIGNMENT
    ) * ALIGNMENT + OTHER.nbytes
    write(tmp_path / "second" / "graph.onnx", "graph.onnx.data", e=SAME)
    shared, saved = share_weights(owner, tmp_path / "second" / "graph.onnx")
    assert saved == SAME.nbytes and np.array_equal(weights_of(shared)["e"], SAME)
    assert not shared.with_name("second.onnx.data").exists()
