# SPDX-License-Identifier: Apache-2.0
"""A mutated CPU kernel of a tail differs from the numpy twin; all mutants are in one compiled library."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from speccompile.backends.onnxruntime.linear_cases import tail_cases
from speccompile.ops.op import Op
from speccompile.ops.registry import OPS
from tests.lab.graphs import open_session
from tests.ops.op_lab import Case, is_at_boundary, model_of, verify_case
from tests.ops.test_finite_token import VALUES, case_of
from tests.plugins.cases import is_possible, wide_case
from tests.plugins.cpu_lab import needs_compiler
from tests.plugins.cpu_mutants import mutated_library
from tests.plugins.mutants import Mutants, Swap, chosen
from tests.plugins.verify_cases import (
    KINDS,
    block_case,
    empty_residual_case,
    grandchild_case,
    late_draws_case,
    warp_case,
)

pytestmark = [needs_compiler, pytest.mark.plan, pytest.mark.mutant]

ROWS, WARP, WALK = "cpu/vocab_rows.h", "cpu/warp.h", "cpu/verify.h"
VERIFY, DRAFT, ROLL = "cpu/verify_ops.h", "cpu/draft_ops.h", "cpu/rollback.h"

MUTANTS: Mutants = {
    "greedy takes the last block": (Swap(ROWS, "top > best.top", "top >= best.top"),),
    "greedy skips entries": (Swap(ROWS, "row[best.index] != best.top", "row[best.index] < best.top - 0.5f"),),
    "the last entry of a chunk is left out": (
        Swap(ROWS, "std::min(kChunk, vocab - chunk * kChunk)", "std::min(kChunk - 1, vocab - chunk * kChunk)"),
    ),
    "the last group of a row is not completed": (Swap(ROWS, "entry = filler", "entry = 5.f"),),
    "sums of half of a chunk": (
        Swap(
            ROWS, "sums[part] = add(sums[part], weight);", "if (i < kChunk / 2) sums[part] = add(sums[part], weight);"
        ),
    ),
    "no temperature": (Swap(ROWS, "div(load(from + part * kLanes), divisor)", "load(from + part * kLanes)"),),
    "small weights are lost": (Swap(ROWS, "broadcast(-87.f)", "broadcast(-3.f)"),),
    "a draw starts a chunk late": (Swap(ROWS, "upto + sum > bound", "upto > bound"),),
    "a draw goes too far": (Swap(ROWS, "upto > bound", "upto > bound * 1.02", within="if (upto > bound) break;"),),
    "entries without weight are drawn": (
        Swap(ROWS, "!(weights.values[i] > 0)", "false"),
        Swap(ROWS, "!(sum > 0)", "false"),
    ),
    "lukewarm slots are greedy": (Swap(WARP, "temperature >= kColdest", "temperature >= 0.1f"),),
    "top_k keeps one more": (Swap(WARP, "warp.top_k", "warp.top_k + 1", within="vocab, warp.top_k, memory"),),
    "top_k passes over the bound's chunk": (Swap(WARP, "tops[chunk] < bound", "tops[chunk] <= bound"),),
    "top_k in logits that are not divided": (
        Swap(WARP, "warp.temperature", "1.f", within="memory.spare) / warp.temperature"),
    ),
    "top_p leaves out the token that reaches it": (
        Swap(WARP, "above + mass >= goal", "equal != begin && above + mass + one >= goal"),
    ),
    "top_p forgets what is above the bracket": (Swap(WARP, "goal - bracket.above", "goal"),),
    "top_p looks above the edge": (Swap(WARP, "masses[k] >= goal", "masses[k] >= goal * 0.9"),),
    "masses of too few chunks": (Swap(WARP, "weights.sums[chunk] < bounds[0]", "weights.sums[chunk] < bounds[3]"),),
    "all ties at top_p are kept": (Swap(WARP, "++ties > edge.num_ties", "++ties > 1 << 30"),),
    "one tie at top_p too few": (
        Swap(WARP, "kept < ties", "false", within="while (kept < ties && above"),
        Swap(
            WARP, "static_cast<i64>((goal - above - mass) / one)", "static_cast<i64>((goal - above - mass) / one) - 1"
        ),
    ),
    "sums are those before the cut": (
        Swap(WARP, "weights.sums[chunk] = sum_of(values, count);", "weights.total += 0;"),
    ),
    "verified as if it had not been chosen": (Swap(WALK, "num > 1", "false", within="return num > 1"),),
    "the residual of the draft's own distribution": (Swap(WALK, "num == 1", "num > 0", within="if (num == 1)"),),
    "one draw too many is counted": (Swap(WALK, "number < chosen.num", "number <= chosen.num"),),
    "of equal classes the last is chosen": (
        Swap(WALK, "ratio_class > chosen.ratio_class", "ratio_class >= chosen.ratio_class"),
    ),
    "classes have each other's masses": (Swap(WALK, "1 - above[i]", "1 - above[0]"),),
    "one edge for all classes": (
        Swap(WALK, "kRatioEdges[i]", "kRatioEdges[0]", within="kRatioEdges[i]), draft), target"),
    ),
    "every prefix of a block passes": (Swap(WALK, "rest / (rest + 1 - weight)", "1.0"),),
    "a block's drafts weigh nothing": (Swap(WALK, "mass / drafted", "1.0", within="? mass / drafted :"),),
    "a block forgets the weights before": (
        Swap(WALK, "path[last].weight", "1.0", within="path[last].weight * static_cast<double>(row.prob(token))"),
    ),
    "a block's residual is not weighed": (
        Swap(WALK, "static_cast<float>(weight)", "1.f", within="memory, static_cast<float>(weight)"),
    ),
    "a whole block passes always": (
        Swap(
            WALK, "static_cast<double>(slot.accept_draw(path[last].node)) < path[last].weight", "path[last].weight > 0"
        ),
    ),
    "a row is taken for the one before": (Swap(WALK, "kept != last - 1", "kept < last - 2"),),
    "forgets the residual": (Swap(WALK, "rest", "target", within="left.values + at, rest"),),
    "does not normalise": (Swap(WALK, "div(load(from + lane), total)", "load(from + lane)"),),
    "an empty residual is drawn from": (Swap(WALK, "!(left.total > 0)", "false"),),
    "keeps the parent's distribution": (
        Swap(
            WALK,
            "row = row_of(path[last].node);",
            "row.total += 0;",
            within="row = row_of(path[last].node);\n    } else",
        ),
    ),
    "reads the accept draw for the token": (Swap(WALK, "uniforms[2 * node + 1]", "uniforms[2 * node]"),),
    "draws the last token by the root": (Swap(WALK, "slot.node_draw(path[kept].node)", "slot.node_draw(0)"),),
    "keeps a child of another node": (
        Swap(WALK, "slot.parents[node] != last", "slot.parents[node] < 0", within="slot.parents[node] != last ||"),
    ),
    "counts the root": (Swap(WALK, "length - 1", "length", within="length - 1;\n    *verdict.next_token = drawn;"),),
    "one warp for all slots": (Swap(VERIFY, "warps[slot]", "warps[0]", within="warps[slot]}"),),
    "NaN is finite": (Swap(VERIFY, "sum < kLargest", "!(sum >= kLargest)"),),
    "one row is looked at": (Swap(VERIFY, "first + nodes", "first + 1", within="*end = first + nodes;"),),
    "the distribution is not normalised": (
        Swap(DRAFT, "normalise(weights);", "weights.add_up();", within="[slot]);\n                normalise(weights);"),
    ),
    "one slot's warp for all nodes": (Swap(DRAFT, "warps[row / nodes]", "warps[0]"),),
    "candidates twice": (Swap(DRAFT, "row[i] == least", "row[i] >= least"),),
    "equal candidates from the end": (Swap(DRAFT, "a < b", "a > b", within=": a < b"),),
    "confidence at another temperature": (
        Swap(DRAFT, "row[token]", "0.9f * row[token]", within="static_cast<double>(row[token])"),
    ),
    "moves from the wrong row": (Swap(ROLL, "rows + path[i] * width", "rows + (path[i] - 1) * width"),),
    "one length for all slots": (Swap(ROLL, "length[slot]", "length[0]", within="rows + length[slot]) * width"),),
}


@dataclass(frozen=True)
class Call:
    """A call, what the twin gives, and whether a draw is at a boundary."""

    op: Op
    inputs: Case
    attributes: dict[str, int | float]
    wanted: tuple[Any, ...]
    is_excused: bool


def _verify_cases() -> Iterator[Case]:
    yield grandchild_case(has_probs=False)
    yield block_case()
    yield block_case(-1, 0, 0, 1, 1)
    wide = wide_case(np.random.default_rng(2), 9000, 2, (-1,), spread=0.0, dtype="float32", temperature=0)
    wide["logits"][0, 0, [520, 800]] = wide["logits"][1, 0, [2600, 7700]] = 1  # maxima in one block, and in two
    yield wide
    for kind in ("ties", "equal", "one token", "masks"):
        yield warp_case(97, kind, has_probs=False)
        yield warp_case(97, kind, has_probs=True)
        yield warp_case(1300, kind, has_probs=False)
    yield empty_residual_case()
    yield late_draws_case()
    rng = np.random.default_rng(7)
    for number in range(36):
        heat, is_chain, has_probs = KINDS[number % len(KINDS)]
        yield verify_case(rng, (1300, 300)[has_probs], is_chain=is_chain, has_probs=has_probs, heat=heat)


@functools.cache
def calls() -> list[Call]:
    """All calls, those of the self-test first."""
    made = list(tail_cases())
    made += [(OPS["FiniteToken"], case_of(300, value), {}) for value in VALUES.values()]
    made += [(OPS["SpecVerify"], case, {}) for case in _verify_cases()]
    return [
        Call(
            op,
            inputs,
            attributes,
            op.twin(*inputs.values(), **attributes),
            op.name == "SpecVerify" and is_at_boundary(inputs),
        )
        for op, inputs, attributes in made
    ]


@dataclass(frozen=True)
class Lab:
    """The library with all mutants, and a session of each op."""

    library: ctypes.CDLL
    sessions: dict[str, ort.InferenceSession]

    def fault(self) -> str | None:
        """Returns the first op that is not its twin's."""
        for call in calls():
            got = self.sessions[call.op.name].run(None, call.inputs)
            is_right = is_possible(call.inputs, got) if call.is_excused else _is_right(got, call.wanted)
            if not is_right:
                return call.op.name
        return None


def _is_right(got: list[Any], wanted: tuple[Any, ...]) -> bool:
    if any(a.shape != b.shape for a, b in zip(got, wanted, strict=True)):
        return False
    return all(
        np.allclose(a, b, atol=1e-6) if a.dtype == np.float32 else np.array_equal(a, b)
        for a, b in zip(got, wanted, strict=True)
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """All mutants, without the kernels of other families."""
    path = mutated_library(tmp_path_factory.mktemp("mutants"), MUTANTS, "verify_ops", "draft_ops", "rollback_op")
    used = {call.op.name: call.attributes for call in calls()}
    sessions = {name: open_session(model_of(name, **attributes), path) for name, attributes in used.items()}
    return Lab(ctypes.CDLL(str(path)), sessions)


def test_the_kernels_themselves_pass(lab: Lab) -> None:
    assert lab.fault() is None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutated_kernel_is_noticed(mutant: str, lab: Lab) -> None:
    with chosen(lab.library, MUTANTS, mutant):
        assert lab.fault() is not None
