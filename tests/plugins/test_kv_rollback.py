# SPDX-License-Identifier: Apache-2.0
"""KVRollback's kernels, run on the CPU, move the same rows as the numpy twin."""

import numpy as np
import pytest

from speccompile.backends.tensorrt.launches import MAX_CACHES, rollback_launches, rollback_vector_bytes
from speccompile.ops.kv_rollback import kv_rollback
from tests.plugins import host_lab

pytestmark = pytest.mark.plan


def _path(rng: np.random.Generator, batch: int, depth: int) -> np.ndarray:
    path = np.full((batch, depth), -1)
    for slot in range(batch):
        kept = np.flatnonzero(rng.random(depth) < 0.6)
        path[slot, : len(kept)] = kept
    return path


def _check(caches: list[np.ndarray], lengths: np.ndarray, path: np.ndarray, **how: int) -> None:
    moved = host_lab.rollback(host_lab.kernels(), caches, lengths, path, **how)
    for number, (cache, got) in enumerate(zip(caches, moved, strict=True)):
        (expected,) = kv_rollback(cache, lengths, path)
        if not np.array_equal(got, expected):
            index = np.argwhere(got != expected)[0].tolist()
            raise AssertionError(f"cache {number}, slot, head, row, entry {index}")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 128), (3, 64), (2, 8), (1, 1), (5, 33), (2, 80), (17, 128)])
def test_random_paths(dtype, kv_heads, head_dim):
    rng = np.random.default_rng(head_dim)
    for number in range(6):
        batch, depth = int(rng.integers(1, 5)), int(rng.integers(1, 40 if number == 0 else 12))
        max_seq = depth + int(rng.integers(0, 30))
        shape = (batch, kv_heads, max_seq, head_dim)
        caches = [rng.normal(size=shape).astype(host_lab.NUMPY_DTYPES[dtype]) for _ in range(3)]
        lengths = rng.integers(0, max_seq - depth + 1, batch)
        _check(caches, lengths, _path(rng, batch, depth), seed=number)


def test_64_slots_and_a_chain_among_them():
    rng = np.random.default_rng(1)
    path = _path(rng, 64, 9)
    path[5] = np.arange(9)
    path[7] = -1
    _check([rng.normal(size=(64, 2, 40, 16)).astype(np.float16)] * 2, rng.integers(0, 32, 64), path)


@pytest.mark.parametrize("align", [2, 4, 16])
def test_addresses_that_wide_loads_cannot_take(align):
    rng = np.random.default_rng(align)
    cache = rng.normal(size=(2, 2, 20, 64)).astype(np.float16)
    assert rollback_vector_bytes(64, "float16", [4096 + align]) == align
    _check([cache], np.array([3, 0]), np.array([[0, 2, 5, -1], [1, 3, -1, -1]]), align=align)


def test_a_gap_in_a_path_keeps_its_row():
    cache = np.random.default_rng(2).normal(size=(1, 2, 20, 8)).astype(np.float32)
    _check([cache], np.array([4]), np.array([[0, -1, 5, 7]]))


def test_rows_beyond_the_cache_are_left_alone():
    """A slot whose length is stale must not write outside of its cache."""
    cache = np.random.default_rng(3).normal(size=(1, 1, 8, 8)).astype(np.float32)
    got = host_lab.rollback(host_lab.kernels(), [cache], np.array([6]), np.array([[1, 3, 4]]))[0]
    expected = cache.copy()
    expected[0, 0, 6] = cache[0, 0, 7]
    np.testing.assert_array_equal(got, expected)


def test_more_caches_than_one_launch_takes():
    pointers = [4096 * (i + 1) for i in range(MAX_CACHES + 3)]
    launches = rollback_launches(pointers, 2, 8, 128, "float16")
    assert [launch.grid for launch, _ in launches] == [(1, 2, MAX_CACHES), (1, 2, 3)]
    assert [p for _, group in launches for p in group] == pointers
    cache = np.random.default_rng(4).normal(size=(1, 1, 6, 8)).astype(np.float16)
    _check([cache + np.float16(i % 7) for i in range(MAX_CACHES + 3)], np.array([1]), np.array([[0, 2, 4]]))
