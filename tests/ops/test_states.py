# SPDX-License-Identifier: Apache-2.0
"""GatedDelta and ConvRows: twins against other people's formulas, bodies against twins, equal bits of all steps."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.ops.registry import reference_ops
from tests.lab.graphs import open_session
from tests.ops.op_lab import model_of, mutated
from tests.ops.state_lab import (
    Layer,
    Run,
    Slots,
    assert_near,
    body_run,
    bound_run,
    conv_layer,
    delta_layer,
    fresh,
    random_step,
    rollback_fault,
    rounds_fault,
    steps_fault,
    trees_fault,
)

LAYERS = {
    "delta rule": delta_layer(),
    "no delta rule": delta_layer(key_heads=1, group=3, key_dim=9, value_dim=4, delta=0),
    "one head of one column": delta_layer(key_heads=1, group=1, key_dim=1, value_dim=1, pending=3),
    "convolution": conv_layer(),
    "long convolution without activation": conv_layer(channels=3, kernel=6, pending=2, activation=0),
    "convolution of one row": conv_layer(channels=5, kernel=1, pending=4),
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())


def _evaluator(layer: Layer) -> Run:
    evaluator = ReferenceEvaluator(model_of(layer.op.name, **layer.attributes))
    return lambda inputs: evaluator.run(None, inputs)


def _body_in_place(layer: Layer) -> Run:
    return bound_run(open_session(model_of(layer.op.name, **layer.attributes)), layer)


RUNS: dict[str, Callable[[Layer], Run]] = {"twin": lambda layer: layer.twin, "body in place": _body_in_place}
each_run = pytest.mark.parametrize("run_of", RUNS.values(), ids=RUNS.keys())


@each_layer
def test_bodies_give_what_the_twin_gives(layer):
    rng, runs = np.random.default_rng(0), (body_run(layer), _evaluator(layer))
    for batch, nodes in ((1, 1), (3, 1), (4, 5), (2, 17)):
        inputs = random_step(layer, rng, batch, nodes, num_void=1, is_tree=nodes == 5)
        wanted = layer.twin(inputs)
        for run in runs:
            for got, twin in zip(run(inputs), wanted, strict=True):
                assert got.dtype == twin.dtype == np.float32
                assert_near(got, twin)


@each_layer
@each_run
def test_steps_of_any_size_give_the_bits_of_one_run(layer, run_of):
    assert steps_fault(layer, run_of(layer)) is None


@each_layer
@each_run
def test_rejected_nodes_leave_no_bit(layer, run_of):
    assert rollback_fault(layer, run_of(layer)) is None


@each_layer
@each_run
def test_slots_share_steps_and_no_bit(layer, run_of):
    assert rounds_fault(layer, run_of(layer)) is None


@each_layer
@each_run
def test_nodes_of_trees_have_the_bits_of_their_paths(layer, run_of):
    assert trees_fault(layer, run_of(layer)) is None


@each_layer
@each_run
def test_a_step_can_be_run_again(layer, run_of):
    """Where no node is sure, a second run of the step at the same lengths has the same output and states."""
    run = run_of(layer)
    batch = Slots(layer, run, 2)
    batch.step([[1, 2, 3], [4, 5, 6]], [3, 3], [3, 3])
    once = batch.step([[7, 8], [9, 10]], [0, 0], [0, 0])
    held = {name: array.copy() for name, array in batch.buffers.items()}
    again = batch.step([[7, 8], [9, 10]], [0, 0], [0, 0])
    np.testing.assert_array_equal(once, again)
    for name, array in batch.buffers.items():
        np.testing.assert_array_equal(held[name], array)


@each_layer
def test_nothing_but_zeros_stands_after_the_pending_rows(layer):
    for run in (layer.twin, body_run(layer)):
        batch = Slots(layer, run, 2)
        batch.step([[1, 2, 3], [4, 5, 6]], [3, 2], [3, 2])
        held = list(batch.buffers.values())[-1]
        count = layer.settled if "rows" in batch.buffers else 0
        assert not held[0, count:].any()
        assert held[1, count].any() and not held[1, count + 1 :].any()


def test_without_the_delta_rule_it_is_the_recurrence_of_mamba_2():
    """h <- h e^(dt A) + dt B x, y = C h, from the definition in float64."""
    layer = delta_layer(key_heads=1, group=3, key_dim=9, value_dim=4, delta=0)
    tokens = np.arange(15)
    rows = {name: table[tokens].astype(np.float64) for name, table in layer.table.items()}
    for head in range(3):
        for run in (layer.twin, body_run(layer)):
            out, held = fresh(layer, run, tokens)
            state = np.zeros((9, 4))
            for i in tokens:
                x = rows["v"][i].reshape(3, 4)[head]
                state = state * math.exp(rows["g"][i, head]) + rows["beta"][i, head] * np.outer(rows["k"][i], x)
                assert_near(out[i].reshape(3, 4)[head], layer.attributes["scale"] * rows["q"][i] @ state)
            assert_near(held[head], state)


@each_layer
def test_the_reference_evaluator_takes_the_twins(layer):
    model = model_of(layer.op.name, **layer.attributes)
    del model.functions[:]
    inputs = random_step(layer, np.random.default_rng(4), 2, 3)
    got = ReferenceEvaluator(model, new_ops=reference_ops()).run(None, inputs)
    for mine, twin in zip(got, layer.twin(inputs), strict=True):
        np.testing.assert_array_equal(mine, twin)


BODY_MUTANTS = [
    ("delta rule", "1) < Unsqueeze(num_owed, [1])", "1) <= Unsqueeze(num_owed, [1])"),
    ("delta rule", "num_owed = lengths - state_lengths", "num_owed = lengths - lengths"),
    ("delta rule", "Slice(owed, gate_end, beta_end", "Slice(owed, value_end, gate_end"),
    ("delta rule", "node_column < sure_nodes", "node_column <= sure_nodes"),
    ("delta rule", "Where(Unsqueeze(lengths == 0, [1, 2, 3]), 0.0, state)", "state"),
    ("delta rule", "}>(replayed, replayed,", "}>(replayed, first,"),
    ("delta rule", "stays_p = Where(is_seen_p, next_p, held_p)", "stays_p = next_p"),
    ("delta rule", "Transpose(tree_mask, perm=[2, 0, 1])", "Transpose(tree_mask, perm=[1, 0, 2])"),
    ("delta rule", "Max(sure_nodes - 1, 0)", "(sure_nodes - 1) * 0"),
    (
        "delta rule",
        "kept_ends = Where(Unsqueeze(sure_nodes > 0, [1, 2, 3, 4]), sure_ends, replayed)",
        "kept_ends = sure_ends",
    ),
    ("delta rule", "is_tree = boolean(ReduceMax(int32(is_other), keepdims=0))", "is_tree = num_nodes < 0"),
    ("convolution", "Unsqueeze(CumSum(seen_of, 2), [3]) <= ", "Unsqueeze(CumSum(seen_of, 2), [3]) < "),
    ("convolution", "Where(levels < 0, levels, ReduceSum(before, [2], keepdims=0))", "levels"),
    ("convolution", "is_tree = boolean(ReduceMax(int32(is_other), keepdims=0))", "is_tree = num_nodes < 0"),
    ("convolution", "past_end = num_owed + num_past", "past_end = num_owed + kernel"),
    ("convolution", "(num_owed + Unsqueeze(sure_nodes, [1]))", "Unsqueeze(sure_nodes, [1])"),
    ("convolution", "(num_owed + Unsqueeze(sure_nodes, [1]))", "num_owed"),
    ("convolution", "Where(Unsqueeze(lengths == 0, [1, 2]), 0.0, rows)", "rows"),
    ("convolution", "seen = reach3 + Unsqueeze(num_owed, [2])", "seen = reach3"),
]


@pytest.mark.mutant
@pytest.mark.parametrize(("name", "right", "wrong"), BODY_MUTANTS)
def test_a_mutated_body_is_noticed(name, right, wrong):
    layer = LAYERS[name]
    session = open_session(mutated(model_of(layer.op.name, **layer.attributes), layer.op, right, wrong))

    def run(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        return session.run(None, inputs)

    assert rollback_fault(layer, run) or rounds_fault(layer, run) or trees_fault(layer, run)
