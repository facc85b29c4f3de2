# SPDX-License-Identifier: Apache-2.0
"""A mutated CPU kernel of experts differs from the numpy twin or reads what it must not."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnxruntime as ort
import pytest

from speccompile.backends.onnxruntime.engine import FAULTS
from speccompile.backends.onnxruntime.kernel_selftest import Case, error_of, open_case, run
from speccompile.backends.onnxruntime.linear_cases import expert_cases, expert_row_fault
from tests.plugins.cpu_lab import needs_compiler
from tests.plugins.cpu_mutants import mutated_library
from tests.plugins.mutants import Mutants, Swap, chosen

pytestmark = [needs_compiler, pytest.mark.plan, pytest.mark.mutant]

EXPERTS, PANELS, TILES, ROWS = "cpu/experts.h", "cpu/panels.h", "cpu/tiles.h", "cpu/rows.h"

MUTANTS: Mutants = {
    "rows in the order of ids": (Swap(EXPERTS, "routes.order[at]", "at", within="values + routes.order[at]"),),
    "one expert more for each row": (Swap(EXPERTS, "num_ids / num_rows", "num_ids / num_rows + 1"),),
    "results in the order of experts": (Swap(EXPERTS, "routes.order[at]", "at", within="y + routes.order[at]"),),
    "weights by the number of the segment": (
        Swap(EXPERTS, "rows.expert", "(&rows - routes.segments)", within="from_panel(weights, rows.expert"),
    ),
    "scales of the first panel": (Swap(PANELS, "later.scales += scales;", "later.scales += 0;"),),
    "minimums of the first panel": (Swap(PANELS, "later.minimums += scales;", "later.minimums += 0;"),),
    "no minimums": (Swap(TILES, "minimum[v]", "zero()", within="minimum[v], total)"),),
    "every number of a group is two bytes": (Swap(TILES, "bytes == 4", "false"),),
    "a group ends with every unit": (Swap(TILES, "--units_left == 0", "true"),),
    "scales stay at the first group": (
        Swap(TILES, "scales += group_bytes, units_left = panel.units_a_group;", "units_left = panel.units_a_group;"),
    ),
    "minimums stay at the first group": (Swap(TILES, "minimums += group_bytes;", "minimums += 0;"),),
    "levels without their scale times the minimum": (
        Swap(ROWS, "static_cast<float>(reduce_add_int(sum)) * scale", "static_cast<float>(reduce_add_int(sum))"),
    ),
    "bias of the first expert": (Swap(EXPERTS, "bias + rows.expert * num_out_", "bias"),),
    "the last row of an expert is left out": (
        Swap(EXPERTS, "count", "std::max<std::int64_t>(1, count - 1)", within="cut_rows<Form>(begin, count,"),
    ),
    "rows of all experts so far for each": (Swap(EXPERTS, "end", "blocks", within="const RowBlock* first = end;"),),
    "blocks of rows begin at the first row": (
        Swap(PANELS, "first_row + begin", "begin", within="{first_row + begin,"),
    ),
    "records of all blocks in the place of the first": (
        Swap(PANELS, "block.at", "std::int64_t{0}", within="records + block.at * made.words"),
    ),
    "the last groups are not quantised": (
        Swap(PANELS, "units * (part + 1) / parts", "(units - 1) * (part + 1) / parts"),
    ),
    "the last panels are left out": (
        Swap(EXPERTS, "panels_a_task - 1", "0", within="(num_panels_ + panels_a_task - 1)"),
    ),
    "experts with one row are left out": (Swap(EXPERTS, "count == 0", "count < 2"),),
    "experts overlap": (Swap(EXPERTS, "next[expert + 1] += begin;", "next[expert + 1] += begin / 2;"),),
    "one expert too many is accepted": (Swap(EXPERTS, "ids[i] >= num_experts", "ids[i] > num_experts"),),
    "no bias": (Swap(PANELS, "copy_columns(panel, bias, added);", "added[0] = 0;"),),
    "up is gate": (Swap(PANELS, "load(sums + kHalf + c)", "load(sums + c)"),),
    "the last block of a chunk is not written": (Swap(PANELS, "block <= &last", "block < &last"),),
}


@dataclass(frozen=True)
class Lab:
    """The library with all mutants, and a session of each op."""

    library: ctypes.CDLL
    cases: list[tuple[Case, ort.InferenceSession]]

    def fault(self) -> str | None:
        """Returns what is wrong; None where nothing is."""
        for case, session in self.cases:
            run(session, {**case.inputs, "x": case.inputs["x"] + 1})  # memory without the right results
            found = error_of(case, session) or expert_row_fault(case.op, partial(run, session), case.inputs)
            if found is not None:
                return found
        return _accepted(*self.cases[0])


def _accepted(case: Case, session: ort.InferenceSession) -> str | None:
    """Returns which expert is taken beyond the last one."""
    ids = np.array(case.inputs["ids"])
    ids[-1, -1] = case.attributes["num_experts"]
    try:
        run(session, {**case.inputs, "ids": ids})
    except FAULTS:
        return None
    return f"expert {ids[-1, -1]} is accepted"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """All mutants, without the kernels of other families."""
    path = mutated_library(tmp_path_factory.mktemp("mutants"), MUTANTS, "expert_ops")
    cases = [Case(*call, by_row=()) for call in expert_cases()]
    return Lab(ctypes.CDLL(str(path)), [(case, open_case(case, str(path))) for case in cases])


def test_the_kernels_themselves_pass(lab: Lab) -> None:
    assert lab.fault() is None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutated_kernel_is_noticed(mutant: str, lab: Lab) -> None:
    with chosen(lab.library, MUTANTS, mutant):
        assert lab.fault() is not None
