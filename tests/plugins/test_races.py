# SPDX-License-Identifier: Apache-2.0
"""No two threads of a block reach a byte of shared memory, one of them writing, without a barrier between."""

from __future__ import annotations

import ctypes
import itertools
import shutil
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

CUTS = ({}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.95}, {"temperature": 0})
# Each takes one barrier away that keeps two threads apart.
BARRIERS = {
    "a sum's scratch is taken too early": (
        "common.cuh",
        "value = warp_sum(lane < THREADS / WARP ? scratch[lane] : V(0));\n    __syncthreads();",
        "value = warp_sum(lane < THREADS / WARP ? scratch[lane] : V(0));",
    ),
    "the tops of other warps are not there": (
        "spec_verify/law.cuh",
        "shared.keys[threadIdx.x / WARP] = key;\n    __syncthreads();",
        "shared.keys[threadIdx.x / WARP] = key;",
    ),
    "bins are read while they fill": (
        "spec_verify/law.cuh",
        "        __syncthreads();\n        u64 before = 0;",
        "        u64 before = 0;",
    ),
    "bins are cleared while they are read": (
        "spec_verify/law.cuh",
        "            shared.above = 0;\n        }\n        __syncthreads();",
        "            shared.above = 0;\n        }",
    ),
    "outcomes of other lanes are not there": ("spec_verify/kernel.cuh", "    __syncwarp();\n", ""),
}


def _random_cases(number: int) -> Iterator[Case]:
    rng = np.random.default_rng(5)
    kinds = list(itertools.product(("greedy", "sampled", "mixed"), (True, False), (True, False)))
    for turn in range(number):
        heat, is_chain, has_laws = kinds[turn % len(kinds)]
        vocab = int(rng.choice((97, 257, 1025)))
        yield verify_case(rng, vocab, is_chain=is_chain, has_laws=has_laws, heat=heat)


def _refusals(vocab: int, **warp: float) -> Case:
    """Drafts drawn from laws that the target does not share, so that most are refused."""
    rng = np.random.default_rng(9)
    case = wide_case(rng, vocab, 2, TREE, spread=1.0, dtype="float32", **warp)
    laws = rng.random((*case["tokens"].shape, vocab)) ** 30
    tokens = laws.argmax(-1)
    return {**case, "tokens": tokens, "draft_probs": (laws / laws.sum(-1, keepdims=True)).astype(np.float32)}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_lab.build_watched(host_lab.PLUGINS, tmp_path_factory.mktemp("watched"))


@pytest.mark.parametrize("is_single", [False, True], ids=["two launches", "one launch"])
def test_there_are_no_races(watched: ctypes.CDLL, is_single: bool) -> None:
    cases = list(_random_cases(24))
    for spread, warp in itertools.product((0.3, 3.0), CUTS):
        cases.append(wide_case(np.random.default_rng(3), 20011, 1, CHAIN, spread=spread, dtype="float32", **warp))
    cases += [_refusals(5000), _refusals(5000, top_k=50), _refusals(5000, top_p=0.9)]
    for case in cases:
        assert_same(lambda feeds: host_lab.verify(watched, feeds, is_single=is_single), case)
    num_accesses, num_races = host_lab.races(watched)
    assert num_accesses > 1_000_000
    assert num_races == 0


def test_there_are_none_with_a_map(watched: ctypes.CDLL) -> None:
    case, rng = _refusals(900), np.random.default_rng(1)
    d2t = rng.permutation(900)[:200]
    laws = case["draft_probs"][..., d2t] + np.float32(1e-4)
    case["draft_probs"], case["tokens"] = laws / laws.sum(-1, keepdims=True), d2t[laws.argmax(-1)]
    assert same(host_lab.verify(watched, case, d2t=d2t), spec_verify(**case, d2t=d2t))
    num_accesses, num_races = host_lab.races(watched)
    assert num_accesses > 1000
    assert num_races == 0


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_missing_barrier_is_noticed(barrier: str, tmp_path: Path) -> None:
    name, right, wrong = BARRIERS[barrier]
    tree = tmp_path / "plugins"
    shutil.copytree(host_lab.PLUGINS, tree)
    text = (tree / name).read_text()
    assert right in text
    (tree / name).write_text(text.replace(right, wrong))
    library = host_lab.build_watched(tree, tmp_path)
    warps = ({}, {"top_k": 50}, {"top_p": 0.9})
    cases = [wide_case(np.random.default_rng(3), 5003, 2, TREE, spread=1.0, dtype="float32", **w) for w in warps]
    for case in cases:
        for seed in range(3):
            host_lab.verify(library, case, seed=seed)
    assert host_lab.races(library)[1] > 0


def test_lanes_that_meet_in_different_calls_end_the_program(tmp_path: Path) -> None:
    right = "    const u32 top = warp_max(key);\n    first = warp_min(lane < SETTLE_WARPS && key == top ?"
    wrong = "    first = warp_min(lane < SETTLE_WARPS && key == warp_max(key) ?"
    tree = tmp_path / "plugins"
    shutil.copytree(host_lab.PLUGINS, tree)
    place = tree / "spec_verify/walk.cuh"
    assert right in place.read_text()
    place.write_text(place.read_text().replace(right, wrong))
    script = f"""
import numpy as np
from pathlib import Path
from tests.ops.op_lab import verify_case
from tests.plugins import host_lab
library = host_lab.build(Path({str(tree)!r}), Path({str(tmp_path / "mutant.so")!r}))
case = verify_case(np.random.default_rng(0), 1025, is_chain=True, has_laws=False, heat="greedy")
host_lab.verify(library, case)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode < 0
    assert "lanes of a warp meet in different calls" in done.stderr
