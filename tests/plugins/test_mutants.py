# SPDX-License-Identifier: Apache-2.0
"""A kernel with one wrong word is noticed by the comparison with the numpy twin."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from speccompile.ops.kv_rollback import kv_rollback
from speccompile.ops.spec_verify import spec_verify
from tests.ops.op_lab import Case, is_at_boundary, same, verify_case
from tests.plugins import host_lab
from tests.plugins.cases import wide_case

KINDS = list(itertools.product(("greedy", "sampled", "mixed"), (True, False), (True, False)))

VERIFY = {
    "greedy takes a lane's last maximum": (
        "scan.cuh",
        "for (int j = LANE_ENTRIES - 1; j >= 0; --j)",
        "for (int j = 0; j < LANE_ENTRIES; ++j)",
    ),
    "greedy takes the last lane": ("scan.cuh", "cell.index = warp_min(at);", "cell.index = warp_max(at + 1) - 1;"),
    "greedy takes the last chunk": (
        "walk.cuh",
        "if (key_from(cell.top) > key) {",
        "if (key_from(cell.top) >= key) {",
    ),
    "greedy takes the last warp": (
        "walk.cuh",
        "first = warp_min(lane < SETTLE_WARPS && key == top ? shared.firsts[lane] : 0xffffffffu);",
        "first = warp_max(lane < SETTLE_WARPS && key == top ? shared.firsts[lane] : 0u);",
    ),
    "masses of half of the entries": (
        "scan.cuh",
        "j < LANE_ENTRIES; ++j) mass +=",
        "j < LANE_ENTRIES / 2; ++j) mass +=",
    ),
    "chunks are not weighed by their tops": ("law.cuh", "cell.mass * expf(cell.top - top)", "cell.mass * expf(0.0f)"),
    "carries are lost": ("law.cuh", "(before + low < low ? 1u : 0u)", "0u"),
    "a bit too few is looked at": (
        "law.cuh",
        "(least ^ most) >> left != 0) ++left;",
        "(least ^ most) >> left > 1) ++left;",
    ),
    "sums are of another temperature": ("layout.cuh", "return fmaf(x, high, x * low);", "return 0.7f * x * high;"),
    "a draw takes what it reaches": (
        "walk.cuh",
        "upto > rest && first == CHUNK",
        "upto >= rest + 0.01 && first == CHUNK",
    ),
    "a draw starts a chunk late": ("walk.cuh", "upto + share > bound", "upto > bound"),
    "no temperature": ("layout.cuh", "if (divisor == 1.0f) return x;", "return x;"),
    "top_k keeps one more": (
        "law.cuh",
        "Order::ENTRIES, 0, static_cast<u64>(top_k)",
        "Order::ENTRIES, 0, 1 + static_cast<u64>(top_k)",
    ),
    "top_p counts the token itself": ("law.cuh", "(goal - edge.above + one - 1) / one", "(goal - edge.above) / one"),
    "top_p ignores top_k": (
        "law.cuh",
        "total = weight_from(work, set, law.key_min);",
        "weight_from(work, set, law.key_min);",
    ),
    "ties from the end": ("law.cuh", "add(~index, 1)", "add(index, 1)"),
    "accepts without the draft law": ("walk.cuh", "drafted) < own", "1.0f) < own"),
    "forgets the residual": (
        "walk.cuh",
        "const float left = mass - draft_at",
        "const float left = mass - 0 * draft_at",
    ),
    "does not normalise": (
        "walk.cuh",
        "shared.unscale[work.num_refused - 1] = static_cast<float>(1.0 / left)",
        "shared.unscale[work.num_refused - 1] = 1",
    ),
    "reads the accept draw for the token": (
        "kernel.cuh",
        "uniform = params.uniforms[2 * row + 1];",
        "uniform = params.uniforms[2 * row];",
    ),
    "keeps a child of another node": (
        "walk.cuh",
        "shared.parents[child] == node &&",
        "shared.parents[child] >= 0 &&",
    ),
    "the sixth chunk is left out": (
        "scan.cuh",
        "if (chunk >= count) break;",
        "if (chunk >= count || chunk == 5) break;",
    ),
    "the last node is not waited for": (
        "kernel.cuh",
        "static_cast<u32>(params.nodes - 1)",
        "static_cast<u32>(params.nodes / 2)",
    ),
    "counters are not cleared": ("scan.cuh", "space.counters[thread] = 0;", "space.counters[thread] += 0;"),
}
ROLLBACK = {
    "moves from the wrong row": (
        "moved[k] = rows[static_cast<i64>(nodes[k]) * params.row_vectors]",
        "moved[k] = rows[static_cast<i64>(nodes[k] - 1) * params.row_vectors]",
    ),
    "writes before it reads": (
        "if (nodes[k] >= 0) moved[k]",
        "if (nodes[k] >= 0 && k % 2) moved[k]",
    ),
    "one slot for all": ("params.lengths[slot]", "params.lengths[0]"),
    "leaves a moving slot": ("if (!is_moving) return;", "if (is_moving) return;"),
}


def _mutated(folder: Path, name: str, right: str, wrong: str):  # type: ignore[no-untyped-def]
    tree = folder / "plugins"
    shutil.copytree(host_lab.PLUGINS, tree)
    text = (tree / name).read_text()
    assert text.count(right) == 1, right
    (tree / name).write_text(text.replace(right, wrong))
    return host_lab.build(tree, folder / "mutant.so", "-O0")


def _grandchild_case() -> Case:
    """The token drawn at the root is that of a grandchild, and of no child."""
    case = {n: a[:1, :1] if a.ndim > 1 else a[:1] for n, a in _random_case(0, np.random.default_rng(0)).items()}
    case = {n: np.repeat(a, 3, axis=1) if a.ndim > 1 else a for n, a in case.items()}
    case["parents"], drawn = np.array([[-1, 0, 1]]), int(case["logits"][0, 0].argmax())
    case["tokens"] = np.array([[0, drawn + 1, drawn]])
    return case


def _random_case(number: int, rng: np.random.Generator) -> Case:
    heat, is_chain, has_laws = KINDS[number % len(KINDS)]
    return verify_case(rng, (1300, 300)[has_laws], is_chain=is_chain, has_laws=has_laws, heat=heat)


def _late_draws(top_k: int, top_p: float) -> Case:
    """The draws end at the last entry that is kept, by index."""
    case = _random_case(4, np.random.default_rng(1))
    case["uniforms"][..., 1], case["top_k"][:], case["top_p"][:] = 0.9999, top_k, top_p
    return case


def _wide_ties() -> Case:
    """Greedy rows whose maxima stand in two chunks: of one thread (which has two of 550 chunks), of two warps."""
    case = wide_case(np.random.default_rng(2), 140_001, 2, (-1,), spread=0.0, dtype="float32", temperature=0)
    case["logits"][0, 0, [520, 800]] = case["logits"][1, 0, [2600, 77_000]] = 1
    return case


def _cases() -> Iterator[Case]:
    yield _grandchild_case()
    yield _wide_ties()
    for top_k in range(1, 6):
        yield _late_draws(top_k, 1.0)
        yield _late_draws(top_k, 0.7)
    rng = np.random.default_rng(7)
    for number in range(48):
        yield _random_case(number, rng)


def _differs(run: Callable[..., object]) -> bool:
    return any(not same(run(case), spec_verify(**case)) and not is_at_boundary(case) for case in _cases())  # type: ignore[arg-type]


def test_the_kernel_itself_passes() -> None:
    assert not _differs(lambda case: host_lab.verify(host_lab.kernels(), case))


@pytest.mark.parametrize("mutant", VERIFY)
def test_a_mutated_spec_verify_is_noticed(mutant: str, tmp_path: Path) -> None:
    name, right, wrong = VERIFY[mutant]
    library = _mutated(tmp_path, f"spec_verify/{name}", right, wrong)
    assert _differs(lambda case: host_lab.verify(library, case))


@pytest.mark.parametrize("mutant", ROLLBACK)
def test_a_mutated_kv_rollback_is_noticed(mutant: str, tmp_path: Path) -> None:
    library = _mutated(tmp_path, "kv_rollback/kernel.cuh", *ROLLBACK[mutant])
    cache = np.random.default_rng(0).normal(size=(2, 2, 30, 16)).astype(np.float16)
    lengths, path = np.array([3, 8]), np.array([[0, 2, 3, 6, 7, 9], [0, 2, 3, -1, -1, -1]])
    (moved,) = host_lab.rollback(library, [cache], lengths, path)
    assert not np.array_equal(moved, kv_rollback(cache, lengths, path)[0])
