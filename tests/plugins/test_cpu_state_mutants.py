# SPDX-License-Identifier: Apache-2.0
"""A mutated CPU kernel of recurrent states is noticed, by its twin or by unequal bits; one library has all mutants."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnxruntime as ort
import pytest

from speccompile.backends.onnxruntime.kernel_selftest import Case, error_of, open_case, run
from speccompile.backends.onnxruntime.state_cases import paths_fault, state_cases, steps_fault, with_trees
from tests.lab.graphs import open_session
from tests.ops.op_lab import model_of
from tests.ops.state_lab import Layer, conv_layer, delta_layer, rounds_fault
from tests.plugins.cpu_lab import needs_compiler
from tests.plugins.cpu_mutants import mutated_library
from tests.plugins.mutants import Mutants, Swap, chosen

pytestmark = [needs_compiler, pytest.mark.plan, pytest.mark.mutant]

MATH, OPS = "cpu/recurrence.h", "cpu/state_ops.h"

MUTANTS: Mutants = {
    "the state does not decay": (
        Swap(MATH, "mul(columns.read(from + i * from_stride, c), decay)", "columns.read(from + i * from_stride, c)"),
    ),
    "what a key finds does not decay": (Swap(MATH, "mul(given.sum(c), broadcast(row.decay))", "given.sum(c)"),),
    "odd rows of the state are not asked": (Swap(MATH, "add(even[c], odd[c])", "even[c]"),),
    "the last row of the state is not asked": (
        Swap(MATH, "i < key_dim", "false", within="if (i < key_dim) {\n        const Float first"),
    ),
    "the last row of the state is not updated": (Swap(MATH, "i < key_dim", "false", within="if (i < key_dim) line"),),
    "the next key is the same one": (Swap(MATH, "step.rows[r + 1].k", "row.k"),),
    "beta is forgotten": (Swap(MATH, "broadcast(row.beta)", "broadcast(1.f)"),),
    "nothing is subtracted": (Swap(MATH, "sub(value, held)", "value"),),
    "no scale": (Swap(MATH, "mul(broadcast(step.scale), answer[c])", "answer[c]"),),
    "one row more is kept": (Swap(OPS, "row + 1 == num_applied", "row + 1 == num_rows || row == num_applied"),),
    "a part of a vector loses its last column": (
        Swap(
            MATH,
            "(count) * sizeof(float)",
            "(count - 1) * sizeof(float)",
            within="memcpy(p, lanes, static_cast<std::size_t>(count) * sizeof(float)",
        ),
    ),
    "a convolution that is a row late": (Swap(MATH, "row(num_held + at)", "row(num_held + at - (num_held + at > 0))"),),
    "taps in the other order": (Swap(MATH, "tap * step.channels", "(step.kernel - 1 - tap) * step.channels"),),
    "no bias": (Swap(MATH, "read(step.bias + column)", "zero()"),),
    "no activation": (Swap(MATH, "step.has_silu ? silu(sum) : sum", "sum"),),
    "an accepted row is not owed": (
        Swap(
            OPS,
            "lengths[slot] - state_lengths[slot]",
            "lengths[slot] - state_lengths[slot] - (lengths[slot] > state_lengths[slot])",
        ),
    ),
    "a rejected row is owed": (
        Swap(
            OPS,
            "call.step.num_owed(slot)",
            "call.step.num_owed(slot) + (call.step.num_owed(slot) == 1)",
            within="num_owed = call.step.num_owed(slot)",
        ),
    ),
    "sure nodes are not applied": (Swap(OPS, "num_owed(slot) + sure[slot]", "num_owed(slot)"),),
    "a sure node is not applied": (
        Swap(OPS, "call.step.num_applied(slot)", "call.step.num_applied(slot) - (call.step.sure[slot] > 1)"),
    ),
    "a draft is applied": (
        Swap(
            OPS,
            "step.num_applied(slot)",
            "step.num_applied(slot) + (step.sure[slot] < nodes)",
            within="applied = step.num_applied(slot), left",
        ),
    ),
    "a new sequence reads the buffer": (Swap(OPS, "lengths[slot] == 0", "false"),),
    "a state that stays is not copied": (Swap(OPS, "num_applied == 0 && from != to", "false"),),
    "no decay of pending rows": (Swap(OPS, "std::exp(g[head])", "1.f"),),
    "beta is forgotten on pending rows": (Swap(OPS, "beta[head]", "1.f", within="beta[head], nullptr"),),
    "decay of another head": (Swap(OPS, "call.g[at * value_heads + head]", "call.g[at * value_heads]"),),
    "value heads take turns with keys": (
        Swap(OPS, "head / (value_heads / key_heads) * call.key_dim", "head % key_heads * call.key_dim"),
    ),
    "pending rows have the root's key": (
        Swap(
            OPS,
            "call.k + at * call.key_width",
            "call.k + slot * call.nodes * call.key_width",
            within="put(call.k + at * call.key_width,",
        ),
    ),
    "pending rows have beta for a decay": (Swap(OPS, "call.g + at * value_heads", "call.beta + at * value_heads"),),
    "pending rows begin with sure nodes": (
        Swap(OPS, "slot * call.nodes + sure", "slot * call.nodes", within="i64 at = slot * call.nodes + sure;"),
        Swap(OPS, "slot * call.nodes + sure + count", "slot * call.nodes + count"),
    ),
    "kept rows of the convolution are a row late": (
        Swap(OPS, "here.row(applied + row)", "here.row(applied + row - (applied > 0))"),
    ),
    "a branch has the state of the node that was walked before": (
        Swap(MATH, "place[above]", "place[before >= 0 ? before + 1 : above]", within="from = place[above]"),
    ),
    "a state is given away before the last branch": (Swap(MATH, "--open[above] == 0", "--open[above] >= 0"),),
    "a branch is asked for its sibling's key": (Swap(MATH, "parent == before", "before >= -1"),),
    "a tree begins before the rows that were accepted": (Swap(MATH, "sure == 0 ? kKept : 0", "kGiven"),),
    "the state that stays is a branch's": (
        Swap(MATH, "node + 1 == sure", "node == sure", within="is_kept = node + 1 == sure"),
    ),
    "a window of the node before, not the parent": (Swap(MATH, "parents[at]", "at - 1"),),
    "a tree that is taken for a chain": (Swap(OPS, "row[parent] == 0", "false"),),
    "one slot's tree for all": (Swap(OPS, "parents.data() + slot * nodes", "parents.data()"),),
    "one slot's lengths for all": (
        Swap(OPS, "step.num_owed(slot)", "step.num_owed(0)", within="num_past + step.num_owed(slot)"),
    ),
}


@dataclass(frozen=True)
class Lab:
    """The library with all mutants, and sessions of the self-test's calls and of small layers."""

    library: ctypes.CDLL
    cases: list[tuple[Case, ort.InferenceSession]]
    layers: list[tuple[Layer, ort.InferenceSession]]

    def faults(self) -> Iterator[str | None]:
        """Yields what each test says."""
        for case, session in self.cases:
            yield error_of(case, session)
            yield error_of(replace(case, inputs=with_trees(case.inputs)), session)
            yield steps_fault(case.op, partial(run, session), case.inputs)
            yield paths_fault(case.op, partial(run, session), case.inputs)
        for layer, session in self.layers:
            yield rounds_fault(layer, partial(run, session), num_rounds=20)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """All mutants, without the kernels of other families."""
    path = mutated_library(tmp_path_factory.mktemp("mutants"), MUTANTS, "state_ops")
    cases = [Case(*call, by_row=()) for call in state_cases()]
    layers = [delta_layer(), conv_layer()]
    return Lab(
        ctypes.CDLL(str(path)),
        [(case, open_case(case, str(path))) for case in cases],
        [(layer, open_session(model_of(layer.op.name, **layer.attributes), path)) for layer in layers],
    )


def test_the_kernels_themselves_pass(lab: Lab) -> None:
    assert not any(lab.faults())


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutated_kernel_is_noticed(mutant: str, lab: Lab) -> None:
    with chosen(lab.library, MUTANTS, mutant), np.errstate(all="ignore"):
        assert any(lab.faults())
