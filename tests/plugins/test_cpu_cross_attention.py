# SPDX-License-Identifier: Apache-2.0
"""RotaryCrossAttention on the CPU: against its definition, equal bits of nodes alone, bounds."""

import numpy as np
import onnxruntime as ort
import pytest

from speccompile.backends.onnxruntime.attention_cases import AttentionSizes, cross_attributes, cross_inputs
from speccompile.backends.onnxruntime.engine import FAULTS
from speccompile.backends.onnxruntime.kernel_selftest import run
from tests.lab.graphs import open_session
from tests.ops.op_lab import model_of
from tests.ops.qkv_lab import naive_cross
from tests.plugins.cpu_lab import library, library_for, needs_compiler

pytestmark = [needs_compiler, pytest.mark.plan]

OP = "RotaryCrossAttention"
BY_SLOT = ("q", "k_cache", "v_cache", "positions", "limits")
BY_NODE = ("q", "positions", "limits")


def open_op(sizes: AttentionSizes, threads: int = 1, variant: str = "native", **others: int) -> ort.InferenceSession:
    attributes = {**cross_attributes(sizes), **others}
    return open_session(model_of(OP, **attributes), library_for(variant), threads)


@pytest.mark.parametrize("variant", ["native", "avx2", "portable"])
def test_error_is_at_most_twice_the_formulas_own(variant):
    rng, calls = np.random.default_rng(0), []
    for index, head_dim in enumerate((2, 6, 16, 20, 64, 80, 128, 256)):
        nodes, rows = (1, 5, 17)[index % 3], (1, 70, 301)[index % 3]
        rotary_dim = head_dim if index % 2 else max(2, head_dim // 4 * 2)
        sizes = AttentionSizes(2, nodes, 1 + index % 2, 1 + index % 6, head_dim, rows, rotary_dim)
        calls.append((sizes, index % 2, cross_inputs(sizes, rng)))
    exact = [naive_cross(inputs, cross_attributes(sizes, kind)) for sizes, kind, inputs in calls]
    own = [naive_cross(inputs, cross_attributes(sizes, kind), np.float32) for sizes, kind, inputs in calls]
    bound = 2 * max(np.abs(mine - wanted).max() for mine, wanted in zip(own, exact, strict=True))
    for (sizes, kind, inputs), wanted in zip(calls, exact, strict=True):
        (got,) = run(open_op(sizes, 2, variant, interleaved=kind), inputs)
        errors = np.abs(got - wanted)
        assert errors.max() <= bound, (sizes, np.argwhere(errors > bound)[0], errors.max(), bound)


def test_threads_slots_and_other_nodes_change_no_bit():
    sizes = AttentionSizes(batch=3, nodes=48, max_seq=300, head_dim=24)
    inputs = cross_inputs(sizes, np.random.default_rng(1))
    one, two = (open_op(sizes, threads) for threads in (1, 2))
    (whole,) = run(one, inputs)
    np.testing.assert_array_equal(run(two, inputs)[0], whole)
    for slot in range(sizes.batch):
        alone = {n: a[slot : slot + 1] if n in BY_SLOT else a for n, a in inputs.items()}
        np.testing.assert_array_equal(run(one, alone)[0][0], whole[slot])
    for node in (0, 1, 16, 47):
        alone = {n: np.ascontiguousarray(a[:, node : node + 1]) if n in BY_NODE else a for n, a in inputs.items()}
        np.testing.assert_array_equal(run(one, alone)[0][:, 0], whole[:, node])


def test_rows_from_the_limit_on_are_not_read():
    sizes = AttentionSizes(nodes=2)
    inputs = cross_inputs(sizes, np.random.default_rng(2))
    inputs["limits"][:] = [[3, 9], [17, 17]]
    session = open_op(sizes)
    (wanted,) = run(session, inputs)
    for slot, limit in enumerate(inputs["limits"].max(axis=1)):
        for name in ("k_cache", "v_cache"):
            inputs[name][slot, :, limit:] = np.nan
    np.testing.assert_array_equal(run(session, inputs)[0], wanted)
    assert np.isfinite(wanted).all()


def test_a_limit_beyond_the_caches_is_all_their_rows():
    sizes = AttentionSizes()
    inputs = cross_inputs(sizes, np.random.default_rng(3))
    inputs["limits"][:] = sizes.max_seq
    session = open_op(sizes)
    (wanted,) = run(session, inputs)
    inputs["limits"][:] = (1 << 63) - 1
    np.testing.assert_array_equal(run(session, inputs)[0], wanted)


@pytest.mark.parametrize(("name", "value"), [("limits", 0), ("limits", -5), ("positions", -1), ("positions", 40)])
def test_nodes_without_a_row_or_a_rotation_are_refused(name, value):
    inputs = cross_inputs(AttentionSizes(), np.random.default_rng(4))
    inputs[name][1, 2] = value
    with pytest.raises(FAULTS, match=f"{OP}: a node (that sees|at position) {value}"):
        run(open_op(AttentionSizes()), inputs)


WRONG_DIMS = [
    ("q", (2, 7, 60)),
    ("k_cache", (2, 4, 40, 20)),
    ("k_cache", (2, 2, 40, 10)),
    ("k_cache", (1, 2, 40, 20)),
    ("v_cache", (2, 2, 39, 20)),
    ("positions", (2, 6)),
    ("limits", (1, 7)),
    ("cos", (40, 5)),
    ("sin", (39, 6)),
]


@pytest.mark.parametrize(("name", "shape"), WRONG_DIMS, ids=str)
def test_tensors_of_other_dims_are_refused(name, shape):
    inputs = cross_inputs(AttentionSizes(), np.random.default_rng(5))
    inputs[name] = np.zeros(shape, inputs[name].dtype)
    model = model_of(OP, **cross_attributes(AttentionSizes()))
    for value in model.graph.input:  # ONNX Runtime itself would refuse a rank
        value.type.tensor_type.ClearField("shape")
    with pytest.raises(FAULTS, match=f"{OP}: "):
        run(open_session(model, library()), inputs)


@pytest.mark.parametrize("wrong", [{"rotary_dim": 22}, {"rotary_dim": 3}, {"num_heads": 5}], ids=str)
def test_attributes_that_make_no_sense_are_refused(wrong):
    inputs = cross_inputs(AttentionSizes(), np.random.default_rng(6))
    with pytest.raises(FAULTS, match=f"{OP}: "):
        run(open_op(AttentionSizes(), **wrong), inputs)
