# SPDX-License-Identifier: Apache-2.0
"""GatedDelta and ConvRows: twins against other people's formulas, bodies against twins, equal bits of all steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.core.specs import LENGTHS, STATE_LENGTHS, SURE_NODES
from speccompile.ops.registry import reference_ops
from tests.ops.op_lab import model_of, session_of
from tests.ops.state_lab import (
    Layer,
    Run,
    Slots,
    conv_layer,
    delta_layer,
    fresh,
    random_step,
    rollback_fault,
    rounds_fault,
    steps_fault,
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


def _body(layer: Layer) -> Run:
    session = session_of(model_of(layer.op.name, **layer.attributes))
    return lambda inputs: session.run(None, inputs)


def _evaluator(layer: Layer) -> Run:
    evaluator = ReferenceEvaluator(model_of(layer.op.name, **layer.attributes))
    return lambda inputs: evaluator.run(None, inputs)


RUNS: dict[str, Callable[[Layer], Run]] = {"twin": lambda layer: layer.twin, "body": _body}
each_run = pytest.mark.parametrize("run_of", RUNS.values(), ids=RUNS.keys())


def assert_near(got: np.ndarray, wanted: np.ndarray, bound: float = 3e-6) -> None:
    """Compares with a tolerance that is a share of the largest number."""
    np.testing.assert_allclose(got, wanted, rtol=0, atol=bound * max(1.0, float(np.abs(wanted).max(initial=0))))


@each_layer
def test_bodies_give_what_the_twin_gives(layer: Layer) -> None:
    rng, runs = np.random.default_rng(0), (_body(layer), _evaluator(layer))
    for batch, nodes in ((1, 1), (3, 1), (4, 5), (2, 17)):
        inputs = random_step(layer, rng, batch, nodes, num_void=1)
        wanted = layer.twin(inputs)
        for run in runs:
            for got, twin in zip(run(inputs), wanted, strict=True):
                assert got.dtype == twin.dtype == np.float32
                assert_near(got, twin)


@each_layer
@each_run
def test_steps_of_any_size_give_the_bits_of_one_run(layer: Layer, run_of: Callable[[Layer], Run]) -> None:
    assert steps_fault(layer, run_of(layer)) is None


@each_layer
@each_run
def test_rejected_nodes_leave_no_bit(layer: Layer, run_of: Callable[[Layer], Run]) -> None:
    assert rollback_fault(layer, run_of(layer)) is None


@each_layer
@each_run
def test_slots_share_steps_and_no_bit(layer: Layer, run_of: Callable[[Layer], Run]) -> None:
    assert rounds_fault(layer, run_of(layer)) is None


@each_layer
@each_run
def test_a_step_can_be_run_again(layer: Layer, run_of: Callable[[Layer], Run]) -> None:
    """Where no node is sure, a second run of the step at the same lengths has the same output and states."""
    run = run_of(layer)
    slots = Slots(layer, run, 2)
    slots.step([[1, 2, 3], [4, 5, 6]], [3, 3], [3, 3])
    once = slots.step([[7, 8], [9, 10]], [0, 0], [0, 0])
    held = {name: array.copy() for name, array in slots.buffers.items()}
    again = slots.step([[7, 8], [9, 10]], [0, 0], [0, 0])
    np.testing.assert_array_equal(once, again)
    for name, array in slots.buffers.items():
        np.testing.assert_array_equal(held[name], array)


@each_layer
def test_nothing_but_zeros_stands_after_the_pending_rows(layer: Layer) -> None:
    for run in (layer.twin, _body(layer)):
        slots = Slots(layer, run, 2)
        slots.step([[1, 2, 3], [4, 5, 6]], [3, 2], [3, 2])
        held = list(slots.buffers.values())[-1]
        count = layer.settled if "rows" in slots.buffers else 0
        assert not held[0, count:].any()
        assert held[1, count].any() and not held[1, count + 1 :].any()


@pytest.mark.parametrize("key_heads", [1, 2])
def test_the_delta_rule_is_that_of_transformers(key_heads: int) -> None:
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    layer = delta_layer(key_heads=key_heads, group=3, key_dim=8, value_dim=12)
    tokens, heads = np.arange(20), key_heads * 3
    rows = {name: torch.from_numpy(table[tokens][None]) for name, table in layer.table.items()}
    q, k = (rows[name].view(1, 20, key_heads, 8) for name in "qk")
    arguments = (q, k, rows["v"].view(1, 20, heads, 12), rows["g"], rows["beta"])
    wanted, state = torch_recurrent_gated_delta_rule(*arguments, output_final_state=True)
    for run in (layer.twin, _body(layer)):
        out, held = fresh(layer, run, tokens)
        assert_near(out, wanted[0].flatten(1).numpy())
        assert_near(held, state[0].numpy())


def test_a_state_is_continued_as_transformers_does() -> None:
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    layer = delta_layer()
    inputs = random_step(layer, np.random.default_rng(3), 3, 4)
    inputs[STATE_LENGTHS] = inputs[LENGTHS] = np.array([0, 5, 9])
    inputs[SURE_NODES] = np.full(3, 4)
    given = {name: torch.from_numpy(array) for name, array in inputs.items()}
    q, k = (given[name].view(3, 4, 2, 6) for name in "qk")
    initial = given["state"].clone()
    initial[0] = 0
    arguments = (q, k, given["v"].view(3, 4, 4, 5), given["g"], given["beta"])
    wanted, state = torch_recurrent_gated_delta_rule(*arguments, initial_state=initial, output_final_state=True)
    out, updated, _ = layer.twin(inputs)
    assert_near(out, wanted.flatten(2).numpy())
    assert_near(updated, state.numpy())


def test_without_the_delta_rule_it_is_the_recurrence_of_mamba_2() -> None:
    """h <- h e^(dt A) + dt B x, y = C h, from the definition in float64."""
    layer = delta_layer(key_heads=1, group=3, key_dim=9, value_dim=4, delta=0)
    tokens = np.arange(15)
    rows = {name: table[tokens].astype(np.float64) for name, table in layer.table.items()}
    for head in range(3):
        for run in (layer.twin, _body(layer)):
            out, held = fresh(layer, run, tokens)
            state = np.zeros((9, 4))
            for i in tokens:
                x = rows["v"][i].reshape(3, 4)[head]
                state = state * math.exp(rows["g"][i, head]) + rows["beta"][i, head] * np.outer(rows["k"][i], x)
                assert_near(out[i].reshape(3, 4)[head], layer.attributes["scale"] * rows["q"][i] @ state)
            assert_near(held[head], state)


@pytest.mark.parametrize("activation", [0, 1])
def test_the_convolution_is_that_of_torch(activation: int) -> None:
    torch = pytest.importorskip("torch")
    layer = conv_layer(channels=7, kernel=4, activation=activation)
    tokens = np.arange(12)
    x = torch.from_numpy(layer.table["x"][tokens]).T[None]
    weight, bias = (torch.from_numpy(layer.constants[name]) for name in ("weight", "bias"))
    wanted = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=3, groups=7)[0, :, :12].T
    wanted = torch.nn.functional.silu(wanted) if activation else wanted
    for run in (layer.twin, _body(layer)):
        out, held = fresh(layer, run, tokens)
        assert_near(out, wanted.numpy())
        np.testing.assert_array_equal(held, layer.table["x"][tokens[-3:]])


@each_layer
def test_the_reference_evaluator_takes_the_twins(layer: Layer) -> None:
    model = model_of(layer.op.name, **layer.attributes)
    del model.functions[:]
    inputs = random_step(layer, np.random.default_rng(4), 2, 3)
    got = ReferenceEvaluator(model, new_ops=reference_ops()).run(None, inputs)
    for mine, twin in zip(got, layer.twin(inputs), strict=True):
        np.testing.assert_array_equal(mine, twin)
