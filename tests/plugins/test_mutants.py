# SPDX-License-Identifier: Apache-2.0
"""A mutated kernel is detected by the comparison with the numpy twin."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from speccompile.ops.kv_rollback import kv_rollback
from speccompile.ops.spec_verify import spec_verify
from tests.ops.op_lab import Case, is_at_boundary, same, verify_case
from tests.plugins import host_lab
from tests.plugins.cases import wide_case
from tests.plugins.mutants import Mutants, Swap, chosen, write_mutants
from tests.plugins.verify_cases import KINDS, block_case, grandchild_case

pytestmark = pytest.mark.mutant

SCAN, WALK, DIST = "spec_verify/scan.cuh", "spec_verify/walk.cuh", "spec_verify/dist.cuh"
LAYOUT, VERDICT, ROLL = "spec_verify/layout.cuh", "spec_verify/kernel.cuh", "kv_rollback/kernel.cuh"

VERIFY: Mutants = {
    "greedy takes a lane's last maximum": (
        Swap(SCAN, "LANE_ENTRIES - 1", "0"),
        Swap(SCAN, "j >= 0", "j < LANE_ENTRIES"),
        Swap(SCAN, "--j", "++j"),
    ),
    "greedy takes the last lane": (Swap(SCAN, "cell.index = warp_min(at);", "cell.index = warp_max(at + 1) - 1;"),),
    "greedy takes the last chunk": (Swap(WALK, "key_from(cell.top) > key", "key_from(cell.top) >= key"),),
    "greedy takes the last warp": (
        Swap(
            WALK,
            "warp_min(lane < RESOLVE_WARPS && key == top ? shared.firsts[lane] : 0xffffffffu)",
            "warp_max(lane < RESOLVE_WARPS && key == top ? shared.firsts[lane] : 0u)",
        ),
    ),
    "masses of half of the entries": (
        Swap(
            SCAN,
            "mass += exp_fast(scaled(entries[j]) - scaled_top);",
            "if (j < LANE_ENTRIES / 2) mass += exp_fast(scaled(entries[j]) - scaled_top);",
        ),
    ),
    "chunks are not weighed by their tops": (Swap(DIST, "cell.mass * expf(cell.top - top)", "cell.mass * expf(0.0f)"),),
    "carries are lost": (Swap(DIST, "(before + low < low ? 1u : 0u)", "0u"),),
    "a bit too few is looked at": (Swap(DIST, "(least ^ most) >> left != 0", "(least ^ most) >> left > 1"),),
    "sums are of another temperature": (Swap(LAYOUT, "return fmaf(x, high, x * low);", "return 0.7f * x * high;"),),
    "a draw takes what it reaches": (
        Swap(WALK, "upto > rest && first == CHUNK", "upto >= rest + 0.01 && first == CHUNK"),
    ),
    "a draw starts a chunk late": (Swap(WALK, "upto + share > bound", "upto > bound"),),
    "no temperature": (Swap(LAYOUT, "divisor == 1.0f", "true"),),
    "top_k keeps one more": (
        Swap(
            DIST,
            "static_cast<u64>(top_k)",
            "1 + static_cast<u64>(top_k)",
            within="Order::ENTRIES, 0, static_cast<u64>(top_k)",
        ),
    ),
    "top_p counts the token itself": (Swap(DIST, "(goal - edge.above + one - 1) / one", "(goal - edge.above) / one"),),
    "top_p ignores top_k": (
        Swap(DIST, "total = weight_from(work, set, dist.key_min);", "weight_from(work, set, dist.key_min);"),
    ),
    "ties from the end": (Swap(DIST, "add(~index, 1)", "add(index, 1)"),),
    "verified as if it had not been chosen": (
        Swap(WALK, "work.num_children > 1", "false", within="return work.num_children > 1"),
    ),
    "one draw too many is counted": (Swap(WALK, "i < work.num_children", "i <= work.num_children"),),
    "of equal classes the last is chosen": (Swap(WALK, "own > highest", "own >= highest"),),
    "classes have each other's masses": (Swap(WALK, "sums[number]", "sums[0]"),),
    "every prefix of a block passes": (Swap(WALK, "rest / (rest + 1 - weight)", "1.0"),),
    "a block is weighed by the target alone": (
        Swap(WALK, "static_cast<float>(mass / drafted)", "static_cast<float>(mass)"),
    ),
    "a block forgets the weights before": (
        Swap(
            WALK,
            "static_cast<double>(shared.weights[last])",
            "1.0",
            within="mass = static_cast<double>(shared.weights[last])",
        ),
    ),
    "a block's residual is not weighed": (Swap(WALK, "work.weight = shared.weights[at];", "work.weight = 1;"),),
    "a whole block passes always": (Swap(WALK, "!(uniform < weight)", "false"),),
    "forgets the residual": (Swap(WALK, "own - chosen_at(work, target, index)", "own"),),
    "a race of tokens alike": (Swap("spec_verify/race.cuh", "(token + 1u)", "1u"),),
    "a race of one key": (Swap("spec_verify/race.cuh", "key_from_draw(draws[1])", "key_from_draw(draws[0])"),),
    "a race without weights": (Swap(SCAN, "exp_fast(scaled_top - scaled(entries[j]))", "1.0f"),),
    "a race among those that are cut": (
        Swap(WALK, "expf(work.dist.top - scaled)", "1.0f", within="expf(work.dist.top - scaled));"),
    ),
    "chunks race by their tops": (Swap(SCAN, "own.top -= own_lag;", "own.top -= 0;"),),
    "keeps a child of another node": (Swap(WALK, "shared.parents[child] == node", "shared.parents[child] >= 0"),),
    "the sixth chunk is left out": (Swap(SCAN, "chunk >= count", "chunk >= count || chunk == 5"),),
    "the last node is not waited for": (
        Swap(VERDICT, "static_cast<u32>(params.nodes - 1)", "static_cast<u32>(params.nodes / 2)"),
    ),
    "counters are not cleared": (Swap(SCAN, "space.counters[thread] = 0;", "space.counters[thread] += 0;"),),
}
ROLLBACK: Mutants = {
    "moves from the wrong row": (
        Swap(
            ROLL,
            "static_cast<i64>(nodes[k]) * params.row_vectors",
            "static_cast<i64>(nodes[k] - 1) * params.row_vectors",
        ),
    ),
    "writes before it reads": (
        Swap(ROLL, "nodes[k] >= 0", "nodes[k] >= 0 && k % 2", within="if (nodes[k] >= 0) moved[k]"),
    ),
    "one slot for all": (Swap(ROLL, "params.lengths[slot]", "params.lengths[0]"),),
    "leaves a moving slot": (Swap(ROLL, "!is_moving", "is_moving"),),
}
MUTANTS = {**VERIFY, **ROLLBACK}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """All mutants."""
    folder = tmp_path_factory.mktemp("mutants")
    write_mutants(folder / "plugins", MUTANTS)
    return host_lab.build(folder / "plugins", folder / "mutants.so")


def _random_case(number: int, rng: np.random.Generator) -> Case:
    heat, is_chain, has_probs = KINDS[number % len(KINDS)]
    return verify_case(rng, (1300, 300)[has_probs], is_chain=is_chain, has_probs=has_probs, heat=heat)


def _late_draws(top_k: int, top_p: float) -> Case:
    """The draws end at the last entry that is kept, by index."""
    case = _random_case(4, np.random.default_rng(1))
    case["uniforms"][..., 1], case["top_k"][:], case["top_p"][:] = 0.9999, top_k, top_p
    vocab, nodes = case["logits"].shape[-1], case["tokens"].shape[1]
    case["logits"][..., -1], case["tokens"][:] = -np.inf, vocab - 1  # the draft is impossible: what is left is drawn
    case["parents"][:] = np.arange(-1, nodes - 1)
    case["draft_probs"][:] = np.eye(vocab, dtype=np.float32)[vocab - 1]
    return case


def _last_chunk() -> Case:
    """The sixth chunk of the rows has all the mass."""
    case = wide_case(np.random.default_rng(3), 1300, 2, (-1,), spread=0.1, dtype="float32")
    case["logits"][..., 1290] = 40
    return case


def _small_masses() -> Case:
    """Half of the mass is that of thousands of tokens."""
    case = wide_case(np.random.default_rng(4), 9000, 8, (-1,), spread=0.3, dtype="float32", top_p=0.7)
    case["logits"] -= 9
    case["logits"][..., 5] = 0
    return case


def _wide_ties() -> Case:
    """Greedy rows whose maxima are in two chunks: of one thread (which has two of 550 chunks), of two warps."""
    case = wide_case(np.random.default_rng(2), 140_001, 2, (-1,), spread=0.0, dtype="float32", temperature=0)
    case["logits"][0, 0, [520, 800]] = case["logits"][1, 0, [2600, 77_000]] = 1
    return case


def _cases() -> Iterator[Case]:
    yield grandchild_case(has_probs=True)
    yield _wide_ties()
    yield _last_chunk()
    yield _small_masses()
    yield block_case()
    yield block_case(-1, 0, 0, 1, 1)
    for top_k in range(1, 6):
        yield _late_draws(top_k, 1.0)
        yield _late_draws(top_k, 0.7)
    rng = np.random.default_rng(7)
    for number in range(48):
        yield _random_case(number, rng)


@functools.cache
def _expected() -> list[tuple[Case, object, bool]]:
    """Returns the cases, the twin's verdicts, and whether they are at a boundary."""
    return [(case, spec_verify(**case), is_at_boundary(case)) for case in _cases()]  # type: ignore[arg-type]


def _differs(run: Callable[..., object]) -> bool:
    return any(not is_excused and not same(run(case), wanted) for case, wanted, is_excused in _expected())  # type: ignore[arg-type]


def test_the_kernel_itself_passes(library: ctypes.CDLL) -> None:
    assert not _differs(lambda case: host_lab.verify(host_lab.kernels(), case))
    assert not _differs(lambda case: host_lab.verify(library, case))  # the copy with switches, none of them chosen


@pytest.mark.parametrize("mutant", VERIFY)
def test_a_mutated_spec_verify_is_noticed(mutant: str, library: ctypes.CDLL) -> None:
    with chosen(library, MUTANTS, mutant):
        assert _differs(lambda case: host_lab.verify(library, case))


def _moved(library: ctypes.CDLL) -> bool:
    """Whether the library's rollback is the twin's."""
    cache = np.random.default_rng(0).normal(size=(2, 2, 30, 16)).astype(np.float16)
    lengths, path = np.array([3, 8]), np.array([[0, 2, 3, 6, 7, 9], [0, 2, 3, -1, -1, -1]])
    (moved,) = host_lab.rollback(library, [cache], lengths, path)
    return np.array_equal(moved, kv_rollback(cache, lengths, path)[0])


@pytest.mark.parametrize("mutant", ROLLBACK)
def test_a_mutated_kv_rollback_is_noticed(mutant: str, library: ctypes.CDLL) -> None:
    assert _moved(library)
    with chosen(library, MUTANTS, mutant):
        assert not _moved(library)
