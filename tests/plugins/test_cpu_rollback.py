# SPDX-License-Identifier: Apache-2.0
"""The CPU kernel of KVRollback moves the rows of an accepted path as the numpy twin does, bound caches in place."""

import numpy as np
import pytest
from onnx import TensorProto

from speccompile.backends.onnxruntime.engine import FAULTS
from speccompile.ops.kv_rollback import kv_rollback
from tests.lab.graphs import open_session
from tests.ops.op_lab import Case, model_of
from tests.plugins.cpu_lab import library, needs_compiler

pytestmark = [needs_compiler, pytest.mark.plan]


def random_call(rng: np.random.Generator, batch: int, heads: int, width: int, depth: int) -> Case:
    path = np.full((batch, depth), -1)
    for slot in range(batch):
        kept = np.flatnonzero(rng.random(depth) < 0.5)
        path[slot, : len(kept)] = kept
    max_seq = depth + int(rng.integers(0, 30))
    cache = rng.standard_normal((batch, heads, max_seq, width)).astype(np.float32)
    return {"cache": cache, "lengths": rng.integers(0, max_seq - depth + 1, batch), "path": path}


@pytest.mark.parametrize(("heads", "width"), [(1, 1), (2, 8), (3, 33), (9, 128)])
def test_random_paths(heads, width):
    rng = np.random.default_rng(width)
    sessions = [open_session(model_of("KVRollback"), library(), threads) for threads in (1, 2)]
    for depth in (1, 2, 9, 33):
        case = random_call(rng, 4, heads, width, depth)
        for session in sessions:
            np.testing.assert_array_equal(session.run(None, case)[0], kv_rollback(**case)[0])


def test_levels_of_int8_caches_move_as_floats_do():
    case = random_call(np.random.default_rng(1), 4, 3, 33, 9)
    case["cache"] = (40 * case["cache"]).astype(np.int8)
    model = model_of("KVRollback")
    for value in (*model.graph.input[:1], *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.INT8
    np.testing.assert_array_equal(open_session(model, library()).run(None, case)[0], kv_rollback(**case)[0])


def test_a_bound_cache_is_changed_in_place():
    case = random_call(np.random.default_rng(0), 3, 2, 16, 12)
    held, session = case["cache"].copy(), open_session(model_of("KVRollback"), library())
    binding = session.io_binding()
    for name, array in (("cache", held), ("lengths", case["lengths"]), ("path", case["path"])):
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    binding.bind_output("updated", "cpu", 0, np.float32, held.shape, held.ctypes.data)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(held, kv_rollback(**case)[0])


@pytest.mark.parametrize(
    ("length", "path"),
    [
        (-1, [0, 1, 2]),
        (18, [0, 1, 2]),
        (1 << 62, [0, 1, 2]),
        (0, [0, 20, -1]),
        (0, [0, (1 << 63) - 1, -1]),
        (0, [1, 0, -1]),
        (0, [1, 1, -1]),
        (0, [0, 2, 1]),
    ],
)
def test_paths_that_do_not_rise_or_end_outside_are_refused(length, path):
    cache = np.zeros((1, 2, 20, 4), np.float32)
    session = open_session(model_of("KVRollback"), library())
    with pytest.raises(FAULTS, match=r"KVRollback: path\[0, \d\] is .* expected rising nodes within the 20 rows"):
        session.run(None, {"cache": cache, "lengths": np.array([length]), "path": np.array([path])})
