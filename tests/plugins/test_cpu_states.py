# SPDX-License-Identifier: Apache-2.0
"""Recurrent states on the CPU: kernels against their definition, equal bits of all steps, in place, bounds."""

from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from speccompile.backends.onnxruntime.engine import FAULTS
from speccompile.backends.onnxruntime.kernel_selftest import run
from speccompile.backends.onnxruntime.state_cases import paths_fault, state_cases, steps_fault
from speccompile.core.specs import LENGTHS, STATE_LENGTHS, SURE_NODES, TREE_MASK
from tests.lab.graphs import open_session
from tests.ops.op_lab import model_of
from tests.ops.state_lab import Arrays, Layer, Run, bound_run, conv_layer, delta_layer, fault_of, mask_of, random_step
from tests.plugins.cpu_lab import library, library_for, needs_compiler

pytestmark = [needs_compiler, pytest.mark.plan]

VARIANTS = ("native", "avx2", "portable")  # instruction sets
LAYERS = {
    "delta rule": delta_layer(),
    "no delta rule": delta_layer(key_heads=1, group=3, key_dim=9, value_dim=70, delta=0),
    "whole blocks": delta_layer(key_heads=2, group=1, key_dim=32, value_dim=64),
    "blocks, vectors and a part": delta_layer(key_heads=1, group=2, key_dim=7, value_dim=64 + 32 + 5),
    "one head of one column": delta_layer(key_heads=1, group=1, key_dim=1, value_dim=1, pending=3),
    "convolution": conv_layer(channels=300),
    "long convolution without activation": conv_layer(channels=3, kernel=6, pending=2, activation=0),
    "convolution of one row": conv_layer(channels=37, kernel=1, pending=4),
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())


def open_layer(layer: Layer, threads: int = 1, variant: str = "native") -> ort.InferenceSession:
    return open_session(model_of(layer.op.name, **layer.attributes), library_for(variant), threads)


def plain_run(layer: Layer, threads: int = 1, variant: str = "native") -> Run:
    return partial(run, open_layer(layer, threads, variant))


@pytest.mark.parametrize("variant", VARIANTS)
@each_layer
def test_error_is_at_most_twice_the_formulas_own(layer, variant):
    """The formula's own error is that of the twin in float32, against itself in float64."""
    rng, go = np.random.default_rng(0), plain_run(layer, 2, variant)
    calls = [random_step(layer, rng, *sizes) for sizes in ((1, 1), (3, 1), (4, 5), (2, 33))]
    calls += [random_step(layer, rng, *sizes, is_tree=True) for sizes in ((4, 7), (2, 17))]
    bounds, errors = np.zeros(3), np.zeros(3)
    for inputs in calls:
        exact = layer.twin({n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in inputs.items()})
        for index, (got, own, true) in enumerate(zip(go(inputs), layer.twin(inputs), exact, strict=True)):
            assert got.shape == own.shape and got.dtype == own.dtype
            bounds[index] = max(bounds[index], 2 * np.abs(own - true).max())
            errors[index] = max(errors[index], np.abs(got - true).max())
    assert (errors <= bounds + 2.0**-24).all(), (errors, bounds)


@pytest.mark.parametrize("variant", VARIANTS)
@each_layer
def test_every_step_gives_the_same_bits(layer, variant):
    """Whatever its size, its neighbours, what was rejected before it, and whatever void rows hold."""
    assert fault_of(layer, plain_run(layer, 1, variant)) is None


@each_layer
def test_states_that_are_bound_are_updated_in_place(layer):
    session = open_layer(layer, 2)
    in_place = bound_run(session, layer)
    assert fault_of(layer, in_place) is None
    for is_tree in (False, True):
        inputs = random_step(layer, np.random.default_rng(1), 4, 5, is_tree=is_tree)
        for mine, other in zip(in_place(inputs), run(session, inputs), strict=True):
            seen = other != 0 if mine.ndim == 3 else np.ones(other.shape, np.bool_)  # rows after the pending are left
            np.testing.assert_array_equal(mine[seen], other[seen])


@each_layer
@pytest.mark.parametrize("is_tree", [False, True])
def test_threads_and_slots_change_no_bit(layer, is_tree):
    inputs = random_step(layer, np.random.default_rng(2), 5, 24, is_tree=is_tree)
    one, two = (plain_run(layer, threads) for threads in (1, 2))
    whole = one(inputs)
    for mine, other in zip(whole, two(inputs), strict=True):
        np.testing.assert_array_equal(mine, other)
    for slot in range(5):
        alone = one({n: a if n in layer.constants else a[slot : slot + 1] for n, a in inputs.items()})
        for mine, other in zip(whole, alone, strict=True):
            np.testing.assert_array_equal(mine[slot], other[0])


def test_threads_share_work_that_is_large():
    layer = delta_layer(key_heads=4, group=2, key_dim=64, value_dim=64)
    inputs = random_step(layer, np.random.default_rng(3), 3, 16)
    for mine, other in zip(plain_run(layer, 1)(inputs), plain_run(layer, 2)(inputs), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert fault_of(layer, plain_run(layer, 2)) is None


@each_layer
def test_nan_of_a_node_reaches_no_earlier_one(layer):
    inputs = random_step(layer, np.random.default_rng(4), 3, 6)
    inputs[SURE_NODES][:] = 3
    go = plain_run(layer)
    wanted = go(inputs)
    for name in layer.table:
        inputs[name] = inputs[name].copy()
        inputs[name][1, 3:] = np.nan
    got = go(inputs)
    np.testing.assert_array_equal(got[0][1, :3], wanted[0][1, :3])
    assert np.isnan(got[0][1, 3]).all()
    for slot in (0, 2):
        np.testing.assert_array_equal(got[0][slot], wanted[0][slot])
    np.testing.assert_array_equal(got[1][1, : layer.settled], wanted[1][1, : layer.settled])


def test_a_constant_weight_is_a_computed_one():
    layer = conv_layer(channels=300)
    inputs = random_step(layer, np.random.default_rng(5), 2, 5)
    model = model_of("ConvRows", **layer.attributes)
    held = {name: inputs[name] for name in layer.constants}
    for name, array in held.items():
        tensor = model.graph.initializer.add()
        tensor.name, tensor.data_type, tensor.raw_data = name, 1, array.tobytes()
        tensor.dims.extend(array.shape)
    kept = [value for value in model.graph.input if value.name not in held]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    got = run(open_session(model, library()), {n: a for n, a in inputs.items() if n not in held})
    for mine, other in zip(got, plain_run(layer)(inputs), strict=True):
        np.testing.assert_array_equal(mine, other)


WRONG_COUNTS = [
    (STATE_LENGTHS, -1),
    (STATE_LENGTHS, 10),  # more than the length
    (STATE_LENGTHS, 0),  # more rows than can be pending
    (STATE_LENGTHS, -(1 << 63)),
    (STATE_LENGTHS, (1 << 63) - 1),
    (LENGTHS, 0),
    (LENGTHS, (1 << 63) - 1),
    (LENGTHS, -(1 << 63)),
    (SURE_NODES, -1),
    (SURE_NODES, 4),
    (SURE_NODES, (1 << 63) - 1),
]


@pytest.mark.parametrize("layer", [LAYERS["delta rule"], LAYERS["convolution"]], ids=["delta rule", "convolution"])
@pytest.mark.parametrize(("name", "value"), WRONG_COUNTS, ids=str)
def test_counts_that_cannot_be_are_refused_and_nothing_is_written(layer, name, value):
    inputs = random_step(layer, np.random.default_rng(6), 2, 3)
    inputs[LENGTHS][1], inputs[STATE_LENGTHS][1] = 9, 8
    inputs[name][1] = value
    session, before = open_layer(layer), {name: inputs[name].copy() for name in layer.states}
    named = SURE_NODES if name == SURE_NODES else STATE_LENGTHS
    with pytest.raises(FAULTS, match=rf"{layer.op.name}: {named}\[1\] is .*expected"):
        bound_run(session, layer, copies=False)(inputs)
    for state, array in before.items():
        np.testing.assert_array_equal(inputs[state], array)


@pytest.mark.parametrize("layer", [LAYERS["delta rule"], LAYERS["convolution"]], ids=["delta rule", "convolution"])
def test_sure_nodes_that_are_no_chain_are_refused(layer):
    inputs = random_step(layer, np.random.default_rng(6), 2, 4)
    inputs[SURE_NODES][:] = 0, 3
    inputs[TREE_MASK] = mask_of([[-1, 0, 0, 1], [-1, 0, 0, 2]])
    with pytest.raises(
        FAULTS, match=rf"{layer.op.name}: sure_nodes\[1\] is 3 and node 2 follows node 0, expected a chain"
    ):
        run(open_layer(layer), inputs)


@each_layer
def test_a_graph_without_a_tree_mask_has_chains(layer):
    """As versions before trees built them."""
    inputs = random_step(layer, np.random.default_rng(8), 3, 6)
    model = model_of(layer.op.name, **layer.attributes)
    del model.graph.input[-1], model.graph.node[0].input[-1], model.functions[:]
    got = run(open_session(model, library()), {n: a for n, a in inputs.items() if n != TREE_MASK})
    for mine, other in zip(got, plain_run(layer)(inputs), strict=True):
        np.testing.assert_array_equal(mine, other)


WRONG_DIMS: list[tuple[str, Any]] = [
    ("delta rule", {"q": (2, 3, 11)}),
    ("delta rule", {"q": (2, 36)}),
    ("delta rule", {"k": (2, 2, 12)}),
    ("delta rule", {"v": (2, 3, 21)}),
    ("delta rule", {"g": (2, 3, 2)}),
    ("delta rule", {"beta": (3, 3, 4)}),
    ("delta rule", {"state": (2, 2, 6, 5)}),
    ("delta rule", {"state": (2, 4, 30)}),
    ("delta rule", {"pending": (2, 8, 39)}),
    ("delta rule", {"pending": (1, 8, 40)}),
    ("delta rule", {LENGTHS: (1,)}),
    ("delta rule", {STATE_LENGTHS: (3,)}),
    ("delta rule", {SURE_NODES: (2, 1)}),
    ("delta rule", {TREE_MASK: (2, 3, 2)}),
    ("convolution", {TREE_MASK: (2, 9)}),
    ("convolution", {"x": (2, 3, 299)}),
    ("convolution", {"x": (6, 300)}),
    ("convolution", {"weight": (299, 4)}),
    ("convolution", {"weight": (1200,)}),
    ("convolution", {"bias": (301,)}),
    ("convolution", {"rows": (2, 2, 300)}),
    ("convolution", {"rows": (1, 11, 300)}),
    ("convolution", {LENGTHS: (3,)}),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG_DIMS, ids=str)
def test_tensors_of_other_dims_are_refused(name, wrong):
    layer = LAYERS[name]
    inputs: Arrays = random_step(layer, np.random.default_rng(7), 2, 3)
    inputs |= {name: np.zeros(shape, inputs[name].dtype) for name, shape in wrong.items()}
    model = model_of(layer.op.name, **layer.attributes)
    for value in model.graph.input:  # ONNX Runtime itself would refuse a rank
        value.type.tensor_type.ClearField("shape")
    with pytest.raises(FAULTS, match=f"{layer.op.name}: "):
        run(open_session(model, library()), inputs)


@pytest.mark.parametrize("wrong", [{"num_key_heads": 0}, {"num_value_heads": 3}, {"num_value_heads": -2}], ids=str)
def test_heads_that_make_no_sense_are_refused(wrong):
    layer = LAYERS["delta rule"]
    with pytest.raises(FAULTS, match=r"GatedDelta: .* value heads, expected a multiple of the"):
        open_session(model_of("GatedDelta", **{**layer.attributes, **wrong}), library())


def test_the_self_test_takes_the_twins_for_right():
    for op, inputs, attributes in state_cases():

        def twin(given: Arrays, op: Any = op, kinds: Any = attributes) -> list[np.ndarray]:
            return list(op.twin(**given, **kinds))

        assert steps_fault(op, twin, inputs) is None
        assert paths_fault(op, twin, inputs) is None
