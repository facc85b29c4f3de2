# SPDX-License-Identifier: Apache-2.0
"""Low-rank changes on the CPU: the twin's numbers, in bits that no other row and no merged linear decides."""

from typing import Any

import numpy as np
import pytest

from speccompile.backends.onnxruntime.engine import FAULTS
from speccompile.backends.onnxruntime.kernel_selftest import Case, error_of, fault_of, low_rank_fault, open_case, run
from speccompile.backends.onnxruntime.linear_cases import low_rank_cases
from speccompile.ops.low_rank import LOW_RANK
from tests.plugins.cpu_lab import VARIANTS, library, library_for, needs_compiler

pytestmark = [needs_compiler, pytest.mark.plan]


@pytest.fixture(params=[name for name in VARIANTS if name != "avx512-vnni"])
def kernels(request: pytest.FixtureRequest) -> str:
    """The library for one instruction set."""
    return str(library_for(request.param))


@pytest.mark.parametrize(("num_in", "num_out", "rank"), [(1, 1, 1), (16, 32, 8), (33, 70, 3), (257, 129, 40)])
def test_rows_are_the_twins_and_depend_on_nothing_else(num_in, num_out, rank, kernels):
    for call in low_rank_cases(num_in, num_out, rank):
        assert fault_of(Case(*call, by_row=("base", "x", "residual")), kernels) is None


def test_subnormal_numbers_are_zeros_on_every_thread(kernels):
    """-13 Phi(-13) is 8e-38 where Phi(-13) = 6e-39 is not taken for zero: by any of the threads."""
    import torch

    op, inputs, attributes = list(low_rank_cases(33, 70, 3))[3]
    base = np.ones_like(inputs["base"])
    base[..., :35] = -13
    case = Case(op, {**inputs, "base": base, "adapter": np.zeros(3, np.int64)}, attributes, by_row=("base", "x"))
    session = open_case(case, kernels)
    for flushes in (True, False):
        torch.set_flush_denormal(flushes)
        try:
            results = [run(session, case.inputs)[0] for _ in range(50)]
        finally:
            torch.set_flush_denormal(False)
        assert not np.any(results)


def test_a_wrong_twin_is_reported(monkeypatch):
    monkeypatch.setattr("speccompile.ops.low_rank.matmul_rows", lambda a, b: (a @ b) * np.float32(1.01))
    assert "differs by" in str(low_rank_fault(str(library())))


def call_of(**changes: Any) -> tuple[Case, dict[str, np.ndarray]]:
    op, inputs, attributes = next(low_rank_cases())
    return Case(op, inputs, attributes, ()), {**inputs, **changes}


def test_no_adapter_leaves_the_bits_of_the_linear():
    case, inputs = call_of()
    inputs["a"][0] = inputs["b"][0] = np.nan  # not read
    [got] = run(open_case(case, str(library())), inputs)
    assert np.array_equal(got[1], inputs["base"][1]) and not np.array_equal(got[0], inputs["base"][0])


def test_constant_factors_give_the_same_bits():
    """Columns of zeros are found when the session is made."""
    import onnx
    import onnxruntime as ort
    from onnx import numpy_helper

    from speccompile.backends.onnxruntime.kernel_selftest import session_options
    from tests.ops.op_lab import model_of

    case, inputs = call_of()
    model: onnx.ModelProto = model_of("LowRank")
    for name in ("a", "b"):
        model.graph.initializer.append(numpy_helper.from_array(inputs.pop(name), name))
        model.graph.input.remove(next(value for value in model.graph.input if value.name == name))
    options = session_options(str(library()), 2)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert error_of(case, open_case(case, str(library()))) is None
    assert np.array_equal(run(session, inputs)[0], run(open_case(case, str(library())), case.inputs)[0])


def test_what_does_not_fit_is_refused():
    case, _ = call_of()
    session = open_case(case, str(library()))
    for changes, message in (
        ({"adapter": np.array([0, 3, 1])}, "adapter 3 of slot 1, expected 0 to 2"),
        ({"adapter": np.array([0, -1, 1])}, "adapter -1 of slot 1"),
        ({"adapter": np.array([0, 1])}, r"expected \[batch, nodes, out\]"),
        ({"a": np.zeros((3, 4, 70), np.float32)}, r"a \[3, 4, 70\], b \[3, 5, 52\]"),
        ({"x": np.zeros((3, 7, 71), np.float32)}, r"x \[3, 7, 71\]"),
    ):
        with pytest.raises(FAULTS, match=message):
            run(session, {**case.inputs, **changes})
    assert case.op is LOW_RANK
    assert (
        run(session, {**case.inputs, "base": np.zeros((3, 0, 52), np.float32), "x": np.zeros((3, 0, 70), np.float32)})[
            0
        ].size
        == 0
    )
