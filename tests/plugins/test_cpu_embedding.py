# SPDX-License-Identifier: Apache-2.0
"""Rows of an embedding on the CPU: kernel, body and twin have the bits of the weights that linears multiply with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from speccompile.backends.onnxruntime.engine import FAULTS
from speccompile.backends.onnxruntime.kernel_selftest import Case, open_case, row_fault
from speccompile.backends.onnxruntime.linear_cases import NUM_ROWS, OTHER_GRIDS, random_grid, random_packed
from speccompile.ops.op import DOMAIN
from speccompile.ops.packing import unpack
from speccompile.ops.registry import OPS
from tests.lab.graphs import open_session
from tests.plugins.cpu_lab import VARIANTS, Arrays, library, library_for, needs_compiler, rows_model, run, twin_of

pytestmark = [needs_compiler, pytest.mark.plan]
FORMS = ["F32", "Bf16", "Int8", "Int4", "Int8Min", "Int4Min"]
SIZES = [(1, 2), (33, 70), (128, 96), (257, 34)]


@pytest.fixture(params=[name for name in VARIANTS if name != "avx512-vnni"])
def kernels(request: pytest.FixtureRequest) -> Path:
    """The library for one instruction set."""
    return library_for(request.param)


def case_of(form: str, num_in: int, num_out: int, **grid: Any) -> tuple[Any, Arrays, Arrays]:
    """Packed weights, and the op's constants and attributes."""
    packed = random_packed(form, num_in, num_out, num_in, **grid)
    attributes: Arrays = {"num_in": num_in, "num_out": num_out}
    return packed, packed.constants, attributes | ({"group": packed.group} if form.startswith("Int") else {})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_in", "num_out"), SIZES)
def test_rows_have_the_bits_of_the_weights(form, num_in, num_out, kernels):
    name, tokens = f"PackedRows{form}", np.random.default_rng(0).integers(-num_out, num_out, (2, 40))
    for grid in ({}, *(OTHER_GRIDS if form.startswith("Int") else ())):
        packed, constants, attributes = case_of(form, num_in, num_out, **grid)
        right = unpack(packed, form)[:num_in, :num_out].T[tokens]
        model = rows_model(name, constants, attributes)
        found = [run(open_session(model, executor, threads=2), {"tokens": tokens})[0] for executor in (kernels, None)]
        for got in (*found, *twin_of(name, {**constants, "tokens": tokens}, attributes)):
            assert got.shape == right.shape
            assert np.array_equal(got.view(np.int32), right.astype(np.float32).view(np.int32)), grid


def test_rows_of_a_grid_are_those_of_the_file():
    for form in FORMS[2:]:
        grid = random_grid(form, 290, 50, 290, group=16, dtype="float32")
        _, constants, attributes = case_of(form, 290, 50, group=16, dtype="float32")
        model = rows_model(f"PackedRows{form}", constants, attributes)
        (got,) = run(open_session(model, library()), {"tokens": np.arange(50)[None]})
        assert np.array_equal(got[0].view(np.int32), grid.weight().view(np.int32))


@pytest.mark.parametrize("form", FORMS)
def test_tokens_outside_the_vocabulary_are_refused_and_none_are_fine(form):
    _, constants, attributes = case_of(form, 70, 52)
    model = rows_model(f"PackedRows{form}", constants, attributes)
    for executor, expected in ((library(), "token {} at 1, expected one below 52"), (None, "GatherND")):
        session = open_session(model, executor)
        assert run(session, {"tokens": np.zeros((2, 0), np.int64)})[0].shape == (2, 0, 70)
        for token in (52, 63, -53, 1 << 40):
            with pytest.raises(FAULTS, match=expected.format(token)):
                run(session, {"tokens": np.array([[0, token]])})


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_do_not_fit_are_refused_and_computed_ones_run(form):
    name = f"PackedRows{form}"
    _, constants, attributes = case_of(form, 96, 96)
    tokens = np.random.default_rng(0).integers(0, 96, (1, NUM_ROWS))
    case = Case(OPS[name], {"tokens": tokens, **constants}, attributes, ("tokens",))
    assert row_fault(case, open_case(case, str(library()))) is None
    for key, array in constants.items():
        changed = {**constants, key: np.ascontiguousarray(array[1:])}
        with pytest.raises(FAULTS, match=rf"{name}: {key} has dims .* from the attributes"):
            open_session(rows_model(name, changed, attributes), library())
        with pytest.raises(FAULTS, match=rf"{name}: {key} has dims .* from the attributes"):
            run(open_case(case, str(library())), {"tokens": tokens, **changed})


def test_a_sequence_has_rows_and_linears():
    """From the tokens to the logits as one op, with the bits of two."""
    _, constants, attributes = case_of("Int8", 96, 96)
    bias, tokens = np.zeros(96, np.float32), np.array([[5, 95, 0]])
    (rows,) = run(open_session(rows_model("PackedRowsInt8", constants, attributes), library()), {"tokens": tokens})
    program = (
        "PackedRowsInt8 in=0,1,2 out=4 num_in=96 num_out=96 group=32\n"
        "PackedLinearInt8 in=4,1,2,3 out=5 num_in=96 num_out=96\noutputs 4,5"
    )
    model = rows_model("PackedRowsInt8", {**constants, "bias": bias}, {})
    del model.functions[:]
    model.graph.node[0].CopyFrom(_sequence(program))
    model.graph.output.add().CopyFrom(helper.make_tensor_value_info("y", 1, ["batch", "nodes", None]))
    got, logits = run(open_session(model, library()), {"tokens": tokens})
    assert np.array_equal(got, rows)
    wanted = twin_of("PackedLinearInt8", {"x": rows, **constants, "bias": bias}, {"num_in": 96, "num_out": 96})[0]
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


def _sequence(program: str) -> Any:
    names = ["tokens", "weights", "scales", "bias"]
    return helper.make_node("KernelSequence", names, ["rows", "y"], domain=DOMAIN, program=program, num_inputs=4)
