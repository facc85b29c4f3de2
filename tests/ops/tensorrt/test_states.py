# SPDX-License-Identifier: Apache-2.0
"""GatedDelta without a loop against its twin; TensorRT-RTX builds it, and ConvRows, with dynamic batch and nodes."""

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.core.specs import LENGTHS, STATE_LENGTHS, SURE_NODES, TREE_MASK
from speccompile.ops.registry import attach_functions
from speccompile.ops.tensorrt.recurrence import gated_delta_op, most_rows
from tests.lab.graphs import open_session
from tests.ops.op_lab import model_of, mutated
from tests.ops.state_lab import Layer, Run, Slots, assert_near, conv_layer, delta_layer, random_step
from tests.ops.tensorrt.lab import Parsed, Shape

pytestmark = pytest.mark.plan

NODES = 8
LAYERS = {
    "delta rule": delta_layer(),
    "no delta rule": delta_layer(key_heads=1, group=3, key_dim=9, value_dim=4, delta=0),
    "one head of one column": delta_layer(key_heads=1, group=1, key_dim=1, value_dim=1, pending=3),
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
# Sums of 130 rows in another order than the twin's; of steps of drafts a tenth of it.
BOUND, STEP_BOUND = 2e-5, 2e-6


def state_model(layer: Layer) -> onnx.ModelProto:
    """A model of the layer's op with the body for TensorRT; batch and nodes are dynamic."""
    sizes = {tensor.name: tensor.dims for tensor in layer.op.inputs}
    known = {name: table.shape[-1:] for name, table in layer.table.items()}
    known |= {name: array.shape for name, array in layer.constants.items()} | layer.states
    pins = {
        dim: size for name, dims in known.items() for dim, size in zip(sizes[name][-len(dims) :], dims, strict=True)
    }
    return unsized_model(layer, pins)


def unsized_model(layer: Layer, pins: dict[str, int] | None = None) -> onnx.ModelProto:
    """A model of the layer's op with the body for TensorRT; `pins` makes dims static."""
    proto = model_of(layer.op.name, pins, **layer.attributes)
    del proto.functions[:]
    model = ir.from_proto(proto)
    assert attach_functions(model, dialect="tensorrt") == 1
    return ir.to_proto(model)


def profile_of(layer: Layer) -> dict[str, tuple[Shape, Shape, Shape]]:
    """Batch 1 to 4 and 1 to NODES nodes."""
    rows = {name: table.shape[1:] for name, table in layer.table.items()}
    made = {name: ((1, 1, *tail), (2, 4, *tail), (4, NODES, *tail)) for name, tail in rows.items()}
    for name, dims in (*layer.states.items(), (LENGTHS, ()), (STATE_LENGTHS, ()), (SURE_NODES, ())):
        made[name] = ((1, *dims), (2, *dims), (4, *dims))
    made[TREE_MASK] = ((1, 1, 1), (2, 4, 4), (4, NODES, NODES))
    return made


@pytest.mark.parametrize("delta", [0, 1])
def test_the_recurrence_builds_without_a_loop(delta):
    layer = delta_layer(key_heads=2, group=2, key_dim=32, value_dim=16, pending=4, delta=delta)
    made = Parsed(state_model(layer), profile_of(layer))
    assert made.plan_bytes > 0 and not {kind for kind in made.kinds if "PLUGIN" in kind or kind == "TRIP_LIMIT"}
    # A pair of products for each doubling of the blocks, up to a chunk of a prompt and its pending rows.
    assert made.kinds.count("MATRIX_MULTIPLY") == (25 if delta else 6)


def _runs(layer: Layer) -> tuple[Run, Run]:
    """The body on ONNX Runtime and on the reference evaluator."""
    model = unsized_model(layer)
    session, evaluator = open_session(model), ReferenceEvaluator(model)
    return lambda inputs: session.run(None, inputs), lambda inputs: evaluator.run(None, inputs)


def _assert_like_twin(layer: Layer, got: Sequence[np.ndarray], inputs: dict[str, np.ndarray], bound: float) -> None:
    for mine, twin in zip(got, layer.twin(inputs), strict=True):
        assert mine.dtype == np.float32
        assert_near(mine, twin, bound)


@each_layer
def test_the_body_gives_what_the_twin_gives(layer):
    rng, (run, evaluate) = np.random.default_rng(0), _runs(layer)
    for batch, nodes in ((1, 1), (3, 1), (4, 5), (2, 17)):
        inputs = random_step(layer, rng, batch, nodes, num_void=1)
        for way in (run, evaluate):
            _assert_like_twin(layer, way(inputs), inputs, STEP_BOUND)
    inputs = random_step(layer, rng, 2, 128)
    _assert_like_twin(layer, run(inputs), inputs, BOUND)


def test_keys_that_are_alike_and_never_decay_cost_no_digits():
    layer = delta_layer(key_heads=1, group=1, key_dim=16, value_dim=4)
    rng, (run, _) = np.random.default_rng(1), _runs(layer)
    inputs = random_step(layer, rng, 2, 128)
    keys = 0.97 * np.full(16, 0.25) + 0.03 * inputs["k"]
    inputs["k"] = (keys / np.linalg.norm(keys, axis=2, keepdims=True)).astype(np.float32)
    inputs["g"], inputs["beta"] = np.zeros_like(inputs["g"]), np.ones_like(inputs["beta"])
    _assert_like_twin(layer, run(inputs), inputs, BOUND)


def test_more_rows_than_it_was_made_for_are_nan_and_never_other_numbers():
    layer, rng = LAYERS["delta rule"], np.random.default_rng(2)
    out, state, _ = _runs(layer)[0](random_step(layer, rng, 1, 256))
    assert most_rows(17, 17) == 145 and np.isnan(out).all() and np.isnan(state).all()


def _rounds_fault(layer: Layer, run: Run) -> str | None:
    """Returns the first of some steps of three slots whose output or states are not near those of the twin."""
    rng = np.random.default_rng(3)
    ours, twins = Slots(layer, run, 3), Slots(layer, layer.twin, 3)
    for step in range(12):
        nodes = (6, 1, layer.pending)[step % 3]
        sure = np.array([[6, 2, 6], [1, 1, 1], [0, 0, 1]][step % 3])
        kept = np.maximum(sure, rng.integers(0, nodes + 1, 3))
        sure = np.maximum(sure, nodes - layer.pending)
        tokens = rng.integers(0, 60, (3, nodes))
        out, wanted = ours.step(tokens, sure, np.maximum(sure, kept)), twins.step(tokens, sure, np.maximum(sure, kept))
        pairs = [(out, wanted), *((ours.buffers[name], twins.buffers[name]) for name in layer.states)]
        for got, twin in pairs:
            if not np.allclose(got, twin, rtol=0, atol=STEP_BOUND * max(1.0, float(np.abs(twin).max()))):
                return f"step {step}"
    return None


MUTANTS = [
    ("1) < Unsqueeze(num_owed, [1])", "1) <= Unsqueeze(num_owed, [1])"),
    ("Where(Unsqueeze(lengths == 0, [1, 2, 3]), 0.0, state)", "state"),
    ("is_seen = j <= i", "is_seen = j < i"),
    ("Unsqueeze(at < Unsqueeze(sure_nodes", "Unsqueeze(at <= Unsqueeze(sure_nodes"),
    ("kept_sum - sums", "kept_sum"),
    ("links = (k_all @ k_columns) * decays * beta_all", "links = (k_all @ k_columns) * decays"),
    ("by_start = Exp(Slice(sums, num_pending1, [2147483647], [3])) * ", "by_start = "),
    ("x_4 @ links_4 @ x_4", "x_4 @ links_4"),
]


@each_layer
def test_steps_after_steps_stay_near_the_twin(layer):
    assert _rounds_fault(layer, _runs(layer)[0]) is None


@pytest.mark.mutant
@pytest.mark.parametrize(("right", "wrong"), MUTANTS)
def test_a_mutated_body_is_noticed(right, wrong):
    layer = LAYERS["delta rule"]
    session = open_session(mutated(unsized_model(layer), gated_delta_op(32, delta=True), right, wrong))
    assert _rounds_fault(layer, lambda inputs: session.run(None, inputs))


@pytest.mark.parametrize("activation", [0, 1])
def test_the_convolution_builds_without_a_loop(activation):
    layer = conv_layer(channels=48, pending=4, activation=activation)
    made = Parsed(state_model(layer), profile_of(layer))
    assert made.plan_bytes > 0 and not {kind for kind in made.kinds if "PLUGIN" in kind or kind == "TRIP_LIMIT"}
