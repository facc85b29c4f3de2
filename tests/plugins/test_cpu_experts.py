# SPDX-License-Identifier: Apache-2.0
"""Experts on the CPU: kernel, body and twin agree; a row has the same bits whatever shares its step or its experts."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speccompile.backends.onnxruntime.engine import FAULTS
from speccompile.backends.onnxruntime.kernel_selftest import Case, expert_fault, open_case
from speccompile.backends.onnxruntime.linear_cases import OTHER_GRIDS, expert_cases, expert_constants, expert_rows
from speccompile.ops.expert_linear import EXPERT_LINEARS
from speccompile.ops.registry import OPS
from tests.lab.graphs import open_session
from tests.plugins.cpu_lab import (
    VARIANTS,
    Arrays,
    expert_model,
    library,
    library_for,
    linear_model,
    needs_compiler,
    run,
    twin_of,
)

pytestmark = [needs_compiler, pytest.mark.plan]
NAMES = [op.name for op in EXPERT_LINEARS]
SIZES = [(1, 2), (33, 70), (128, 96), (257, 34)]  # one, beyond one group and one panel, none of them padded, odd


@pytest.fixture(params=[name for name in VARIANTS if name != "avx512-vnni"])
def kernels(request: pytest.FixtureRequest) -> Path:
    """The library for one instruction set."""
    return library_for(request.param)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_in", "num_out"), SIZES)
def test_kernel_body_and_twin_agree(name, num_in, num_out, kernels):
    constants, attributes = expert_constants(OPS[name], num_in, num_out, 4, seed=num_in)
    feeds = expert_rows(5, num_in, 4, 2)
    for kind in (0, 1, 2) if "activation" in attributes else (None,):
        if kind is not None:
            attributes["activation"] = kind
        model = expert_model(name, constants, attributes)
        (wanted,) = twin_of(name, {**constants, **feeds}, attributes)
        for executor in (kernels, None):
            (got,) = run(open_session(model, executor), feeds)
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max(), err_msg=f"{executor}")


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_bits_of_the_linear_of_its_expert(name, kernels):
    """So every bound that holds for linears holds for experts."""
    constants, attributes = expert_constants(OPS[name], 291, 100, 3)
    feeds = expert_rows(19, 291, 3, 2)
    (got,) = run(open_session(expert_model(name, constants, attributes), kernels), feeds)
    del attributes["num_experts"]
    linear = name.replace("Expert", "Packed")
    for expert in range(3):
        own = {n: np.ascontiguousarray(array[expert]) for n, array in constants.items()}
        (alone,) = run(open_session(linear_model(linear, own, attributes), kernels), {"x": feeds["x"][None]})
        row, column = np.nonzero(feeds["ids"] == expert)
        assert len(row) > 8
        assert np.array_equal(got.reshape(19, 2, -1)[row, column], alone[0, row])


@pytest.mark.parametrize("form", ["Int8", "Int4", "Int8Min", "Int4Min"])
@pytest.mark.parametrize("grid", OTHER_GRIDS, ids=lambda grid: "_".join(map(str, grid.values())))
def test_kernel_body_and_twin_agree_on_every_grid(form, grid, kernels):
    name = f"GatedExpertLinear{form}"
    constants, attributes = expert_constants(OPS[name], 290, 70, 4, **grid)
    model, feeds = expert_model(name, constants, attributes), expert_rows(5, 290, 4, 2)
    (wanted,) = twin_of(name, {**constants, **feeds}, attributes)
    for executor in (kernels, None):
        (got,) = run(open_session(model, executor), feeds)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max(), err_msg=f"{executor}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("per_row", [1, 2, 8])
def test_rows_have_the_same_bits_in_every_step_and_with_any_threads(name, per_row, kernels):
    most, num_experts = 100, 9
    constants, attributes = expert_constants(OPS[name], 163, 260, num_experts)
    model = expert_model(name, constants, attributes)
    sessions = [open_session(model, kernels, threads) for threads in (1, 2)]
    feeds = expert_rows(most, 163, num_experts, per_row)
    feeds["ids"][::3] = feeds["ids"][0]  # experts with many rows
    alone = [run(sessions[0], {n: a[r : r + 1] for n, a in feeds.items()})[0] for r in range(most)]
    for count in (*range(1, 9), 17, 48, 100):
        order = np.random.default_rng(count).permutation(most)[:count]
        wanted = np.concatenate([alone[row] for row in order])
        for session in sessions:
            (got,) = run(session, {n: np.ascontiguousarray(a[order]) for n, a in feeds.items()})
            assert np.array_equal(got.view(np.int32), wanted.view(np.int32)), f"{count} rows"


@pytest.mark.parametrize("name", NAMES)
def test_rows_may_be_repeated_for_each_expert(name):
    constants, attributes = expert_constants(OPS[name], 70, 52, 5)
    session, feeds = open_session(expert_model(name, constants, attributes), library()), expert_rows(6, 70, 5, 3)
    repeated = {"x": feeds["x"].repeat(3, axis=0), "ids": feeds["ids"].reshape(-1, 1)}
    assert np.array_equal(run(session, feeds)[0], run(session, repeated)[0])


@pytest.mark.parametrize("name", NAMES)
def test_the_body_keeps_rows_apart(name):
    constants, attributes = expert_constants(OPS[name], 70, 52, 5)
    feeds = expert_rows(9, 70, 5, 2)
    for threads in (1, 2):
        session = open_session(expert_model(name, constants, attributes), None, threads)
        (whole,) = run(session, feeds)
        for row in range(9):
            (alone,) = run(session, {n: a[row : row + 1] for n, a in feeds.items()})
            assert np.array_equal(whole[2 * row : 2 * row + 2], alone)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(name, value, kernels):
    constants, attributes = expert_constants(OPS[name], 70, 52, 5)
    session, feeds = open_session(expert_model(name, constants, attributes), kernels), expert_rows(3, 70, 5, 2)
    feeds["ids"][:] = feeds["ids"][0]
    (clean,) = run(session, feeds)
    feeds["x"][1, 5] = value
    (dirty,) = run(session, feeds)
    assert not np.isfinite(dirty[2:4]).all(axis=1).any()
    assert np.array_equal(clean[[0, 1, 4, 5]], dirty[[0, 1, 4, 5]])


@pytest.mark.parametrize("name", NAMES)
def test_steps_without_rows(name, kernels):
    constants, attributes = expert_constants(OPS[name], 70, 52, 5)
    session = open_session(expert_model(name, constants, attributes), kernels)
    (got,) = run(session, {"x": np.zeros((0, 70), np.float32), "ids": np.zeros((0, 2), np.int64)})
    assert got.shape == (0, 26 if "activation" in attributes else 52)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("expert", [-1, 5, 2**40, -(2**62)])
def test_an_expert_that_is_not_there_is_an_error(name, expert):
    constants, attributes = expert_constants(OPS[name], 70, 52, 5)
    feeds = expert_rows(3, 70, 5, 2)
    feeds["ids"][1, 1] = expert
    model = expert_model(name, constants, attributes)
    with pytest.raises(FAULTS, match=re.escape(f"{name}: expert {expert} at 3, expected 0 to 4")):
        run(open_session(model, library()), feeds)
    with pytest.raises(FAULTS):
        run(open_session(model, None), feeds)
    with pytest.raises(IndexError):
        twin_of(name, {**constants, **feeds}, attributes)


def shorter(array: Any, axis: int) -> Any:
    return np.ascontiguousarray(np.delete(array, 0, axis=axis))


@pytest.mark.parametrize("op", EXPERT_LINEARS, ids=lambda op: op.name)
def test_tensors_that_do_not_fit_are_refused(op):
    constants, attributes = expert_constants(op, 96, 96, 3)
    feeds = expert_rows(2, 96, 3, 2)
    computed = open_case(Case(op, {}, attributes, ()), str(library()))
    run(computed, {**feeds, **constants})
    for name, array in constants.items():
        for axis in range(array.ndim):
            wrong = {**constants, name: shorter(array, axis)}
            expected = rf"{op.name}: {name} has dims \[.*\], expected \[.*\] from the attributes"
            with pytest.raises(FAULTS, match=expected):
                open_session(expert_model(op.name, wrong, attributes), library())
            with pytest.raises(FAULTS, match=expected):
                run(computed, {**feeds, **wrong})


@pytest.mark.parametrize(
    ("rows", "ids", "message"),
    [
        ((2, 64), (2, 2), "x has dims [2, 64], expected [rows, 96]"),
        ((1, 2, 96), (2, 2), "x has dims [1, 2, 96], expected [rows, 96]"),
        ((2, 96), (3, 1), "ids have dims [3, 1], expected as many for each of the 2 rows of x"),
        ((0, 96), (3, 1), "ids have dims [3, 1], expected as many for each of the 0 rows of x"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, ids, message):
    constants, attributes = expert_constants(OPS["ExpertLinearInt4"], 96, 96, 3)
    session = open_case(Case(OPS["ExpertLinearInt4"], {}, attributes, ()), str(library()))
    feeds: Arrays = {"x": np.zeros(rows, np.float32), "ids": np.zeros(ids, np.int64)}
    with pytest.raises(FAULTS, match=re.escape(message)):
        run(session, {**feeds, **constants})


@pytest.mark.parametrize("num_experts", [0, -3, 2**40])
def test_a_number_of_experts_out_of_range_is_refused(num_experts):
    constants, attributes = expert_constants(OPS["ExpertLinearF32"], 96, 96, 3)
    with pytest.raises(FAULTS, match=re.escape(f"num_experts {num_experts}, expected 1 to 2^20")):
        open_session(expert_model("ExpertLinearF32", constants, {**attributes, "num_experts": num_experts}), library())


def test_the_self_test_runs_every_expert_op():
    assert list(dict.fromkeys(op.name for op, _, _ in expert_cases())) == NAMES
    assert expert_fault(str(library())) is None
