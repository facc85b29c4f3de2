# SPDX-License-Identifier: Apache-2.0
"""Linears by AMX: rows have the same bits over several stretches of K, results are near the twin's, mutants are not."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.lab.graphs import open_session
from tests.plugins.cpu_lab import has_amx, library, linear_case, linear_model, needs_compiler, rows_for, run, twin_of
from tests.plugins.cpu_mutants import mutated_library
from tests.plugins.mutants import Mutants, Swap, chosen

pytestmark = pytest.mark.plan

NAME = "NormGatedPackedLinearBf16"
NUM_IN, NUM_OUT = 1102, 74  # three stretches of 512, the last pairs no whole step; two panels, the last one in part
NUM_ROWS = 170  # 11 blocks of 15 or 16 rows, in two chunks; so many that the panels share stretches of the activations
AMX, PANELS = "cpu/amx.h", "cpu/panels.h"

MUTANTS: Mutants = {
    "the first eight bits of activations alone": (
        Swap(AMX, "rest = sub(rest, _mm512_castsi512_ps(bits));", "rest = zero();"),
    ),
    "the second part is left out": (
        Swap(AMX, "bits", "part == 1 ? int_zero() : bits", within="_mm512_srli_epi32(bits, 16)"),
    ),
    "the last pairs are left out": (Swap(AMX, "left > 0", "false", within="if (left > 0)"),),
    "the last pairs are those of the panel's beginning": (
        Swap(AMX, "w", "s.weights", within="std::memcpy(padded, w,"),
    ),
    "every stretch begins at the first activations": (Swap(PANELS, "pair / kPartWords", "0"),),
    "every stretch begins with zeros": (Swap(AMX, "s.is_new", "true"),),
    "the second half has the first one's weights": (
        Swap(AMX, "kAmxRowBytes / 2", "0", within="_tile_loadd(5, weights + kAmxRowBytes / 2"),
    ),
    "the second block has the first one's activations": (Swap(AMX, "x[1]", "x[0]", within="_tile_loadd(7, x[1]"),),
    "the second block's sums where the first one's are": (Swap(AMX, "s.rows[0]", "0", within="s.sums + s.rows[0] *"),),
    "activations of the first part thrice": (Swap(AMX, "part * kPartWords * rows[0]", "0"),),
    "the second block's of the first part thrice": (Swap(AMX, "part * kPartWords * rows[1]", "0"),),
}


@pytest.fixture(autouse=True)
def _needs_amx() -> None:
    if not has_amx():
        pytest.skip("THIS CPU HAS NO AMX: its kernel WAS NOT TESTED")


@dataclass(frozen=True)
class Linear:
    """A session of one op with its inputs and the right results."""

    session: ort.InferenceSession
    feeds: Mapping[str, Any]
    right: tuple[np.ndarray, ...]

    def is_right(self) -> bool:
        """Whether all rows are near the twin's, float32's distance."""
        got = run(self.session, self.feeds)
        return all(np.abs(a - b).max() <= 2e-6 * np.abs(b).max() for a, b in zip(got, self.right, strict=True))


def open_linear(path: Any, num_rows: int = NUM_ROWS) -> Linear:
    """The op in a session of the library at `path`."""
    constants, attributes = linear_case(NAME, NUM_IN, NUM_OUT)
    feeds = rows_for(NAME, num_rows, NUM_IN)
    session = open_session(linear_model(NAME, constants, attributes), path)
    return Linear(session, feeds, twin_of(NAME, {**constants, **feeds}, attributes))


@needs_compiler
@pytest.mark.plan
def test_rows_have_the_same_bits_over_several_stretches():
    linear = open_linear(library())
    assert linear.is_right()
    whole = run(linear.session, linear.feeds)
    for count in (1, 2, 15, 16, 17, 37, 96, 150):
        part = run(linear.session, {name: array[:, :count].copy() for name, array in linear.feeds.items()})
        for few, all_rows in zip(part, whole, strict=True):
            assert np.array_equal(few.view(np.int32), all_rows[:, :count].view(np.int32)), f"{count} rows"


@pytest.fixture(scope="module")
def mutated(tmp_path_factory: pytest.TempPathFactory) -> tuple[ctypes.CDLL, Linear]:
    """All mutants, without the kernels of other families."""
    path = mutated_library(tmp_path_factory.mktemp("mutants"), MUTANTS, "linear_ops")
    return ctypes.CDLL(str(path)), open_linear(path)


@needs_compiler
@pytest.mark.plan
@pytest.mark.mutant
@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_a_mutated_kernel_is_noticed(mutant, mutated):
    loaded, linear = mutated
    if mutant is None:
        assert linear.is_right()
        return
    with chosen(loaded, MUTANTS, mutant):
        assert not linear.is_right()
