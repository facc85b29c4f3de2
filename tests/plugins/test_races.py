# SPDX-License-Identifier: Apache-2.0
"""No two threads of a block access a byte of shared memory, one of them writing, without a barrier between."""

import ctypes
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from speccompile.ops.spec_verify import spec_verify
from tests.ops.op_lab import Case, same, verify_case
from tests.plugins import host_lab
from tests.plugins.cases import CHAIN, TREE, assert_same, wide_case
from tests.plugins.mutants import Mutants, Swap, chosen, write_mutants

pytestmark = pytest.mark.mutant

CUTS = ({}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}, {"temperature": 0})
COMMON, WALK, DIST = "common.cuh", "spec_verify/walk.cuh", "spec_verify/dist.cuh"
WITHOUT = "(void)0;"
# Each removes one barrier between two threads; the last makes lanes of a warp call different functions.
BARRIERS: Mutants = {
    "a sum's scratch is taken too early": (
        Swap(COMMON, "__syncthreads();", WITHOUT, within=": V(0));\n    __syncthreads();\n    return value;\n}\n"),
    ),
    "the tops of other warps are not there": (
        Swap(DIST, "__syncthreads();", WITHOUT, within="shared.keys[threadIdx.x / WARP] = key;\n    __syncthreads();"),
    ),
    "bins are read while they fill": (
        Swap(DIST, "__syncthreads();", WITHOUT, within="        __syncthreads();\n        u64 before = 0;"),
    ),
    "bins are cleared while they are read": (
        Swap(
            DIST,
            "__syncthreads();",
            WITHOUT,
            within="            shared.above = 0;\n        }\n        __syncthreads();",
        ),
    ),
    "outcomes of other lanes are not there": (Swap("spec_verify/kernel.cuh", "__syncwarp();", WITHOUT),),
}
SPLIT = "lanes meet in different calls"
MUTANTS: Mutants = {
    **BARRIERS,
    SPLIT: (
        Swap(WALK, "key == top", "key == warp_max(key)", within="lane < RESOLVE_WARPS && key == top ? shared.firsts"),
    ),
}


def _random_cases(number: int) -> Iterator[Case]:
    rng = np.random.default_rng(5)
    kinds = list(itertools.product(("greedy", "sampled", "mixed"), (True, False), (True, False)))
    for turn in range(number):
        heat, is_chain, has_probs = kinds[turn % len(kinds)]
        vocab = int(rng.choice((97, 257, 1025)))
        yield verify_case(rng, vocab, is_chain=is_chain, has_probs=has_probs, heat=heat)


def _refusals(vocab: int, **warp: float) -> Case:
    """Drafts drawn from distributions that the target does not share, so that most are refused."""
    rng = np.random.default_rng(9)
    case = wide_case(rng, vocab, 2, TREE, spread=1.0, dtype="float32", **warp)
    dists = rng.random((*case["tokens"].shape, vocab)) ** 30
    tokens = dists.argmax(-1)
    return {**case, "tokens": tokens, "draft_probs": (dists / dists.sum(-1, keepdims=True)).astype(np.float32)}


def _kept_chains(vocab: int) -> Case:
    """Drawn chains whose drafts are likelier in the target, so that all are kept, and a draw from what top_p keeps."""
    case = wide_case(np.random.default_rng(9), vocab, 2, CHAIN, spread=1.0, dtype="float32", top_p=0.9)
    tokens = np.roll(case["logits"].argmax(-1), 1, axis=1)
    return {**case, "tokens": tokens, "draft_probs": np.full(case["logits"].shape, 1 / vocab, np.float32)}


@pytest.fixture(scope="module")
def mutated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a watched library with all mutants."""
    folder = tmp_path_factory.mktemp("mutated")
    write_mutants(folder / "plugins", MUTANTS)
    host_lab.build_watched(folder / "plugins", folder)
    return folder


@pytest.fixture
def watched(mutated: Path) -> ctypes.CDLL:
    """The library, none of whose mutants is chosen."""
    library = host_lab.load_watched(mutated)
    host_lab.races(library)
    return library


def test_there_are_no_races(watched):
    cases = list(_random_cases(24))
    for spread, warp in itertools.product((0.3, 3.0), CUTS):
        cases.append(wide_case(np.random.default_rng(3), 20011, 1, CHAIN, spread=spread, dtype="float32", **warp))
    cases += [_refusals(5000), _refusals(5000, top_k=50), _refusals(5000, top_p=0.9), _kept_chains(1300)]
    for case in cases:
        assert_same(lambda feeds: host_lab.verify(watched, feeds), case)
    num_accesses, num_races = host_lab.races(watched)
    assert num_accesses > 1_000_000
    assert num_races == 0


def test_there_are_none_with_a_map(watched):
    case, rng = _refusals(900), np.random.default_rng(1)
    d2t = rng.permutation(900)[:200]
    dists = case["draft_probs"][..., d2t] + np.float32(1e-4)
    case["draft_probs"], case["tokens"] = dists / dists.sum(-1, keepdims=True), d2t[dists.argmax(-1)]
    assert same(host_lab.verify(watched, case, d2t=d2t), spec_verify(**case, d2t=d2t))
    num_accesses, num_races = host_lab.races(watched)
    assert num_accesses > 1000
    assert num_races == 0


def _barrier_cases() -> Iterator[Case]:
    for warp in ({}, {"top_k": 50}, {"top_p": 0.9}):
        yield wide_case(np.random.default_rng(3), 5003, 2, TREE, spread=1.0, dtype="float32", **warp)
    yield _kept_chains(1300)


def _num_races(library: ctypes.CDLL) -> int:
    """Returns the races of the first case and order of threads that has any."""
    for case in _barrier_cases():
        for seed in range(3):
            host_lab.verify(library, case, seed=seed)
            if num_races := host_lab.races(library)[1]:
                return num_races
    return 0


def test_no_barrier_is_missing_where_no_mutant_is_chosen(watched):
    assert _num_races(watched) == 0


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_missing_barrier_is_noticed(barrier, watched):
    with chosen(watched, MUTANTS, barrier):
        assert _num_races(watched) > 0


@pytest.mark.parametrize("is_split", [False, True])
def test_lanes_that_meet_in_different_calls_end_the_program(is_split, mutated):
    script = f"""
import numpy as np
from contextlib import nullcontext
from pathlib import Path
from tests.ops.op_lab import verify_case
from tests.plugins import host_lab, mutants, test_races
library = host_lab.load_watched(Path({str(mutated)!r}))
case = verify_case(np.random.default_rng(0), 1025, is_chain=True, has_probs=False, heat="greedy")
with mutants.chosen(library, test_races.MUTANTS, test_races.SPLIT) if {is_split} else nullcontext():
    host_lab.verify(library, case)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode < 0) == is_split
    assert ("lanes of a warp meet in different calls" in done.stderr) == is_split
