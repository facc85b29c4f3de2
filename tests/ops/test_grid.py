# SPDX-License-Identifier: Apache-2.0
"""Grids: outputs taken, and brought to a kind that several have in common, keep every number."""

import itertools

import numpy as np
import pytest

from speccompile.ops.grid import Grid, common_kind, significant_bits

NUM_IN = 96


def make(bits: int, zero: int | None, group: int, *, wide: bool, seed: int = 0, order: bool = False) -> Grid:
    """Random levels, also the outermost; scales of 11 bits, or of 18 where they are wide."""
    rng = np.random.default_rng(seed)
    levels = rng.integers(0, 1 << bits, (5, NUM_IN)).astype(np.uint8)
    levels[:, :2] = 0, (1 << bits) - 1
    shape = (5, -(-NUM_IN // group))
    scales = rng.uniform(0.01, 0.1, shape).astype(np.float16)
    if wide:
        scales = (scales.astype(np.float32) * rng.integers(33, 64, shape)).astype(np.float32)
    minimums = None if zero is not None else -rng.uniform(0, 1, shape).astype(scales.dtype)
    inputs = rng.permutation(NUM_IN).astype(np.int32) if order else None
    return Grid(levels, scales, group, bits, zero or 0, minimums, inputs)


GRIDS = {
    "4 bits": make(4, 8, 32, wide=False, seed=1),
    "2 bits": make(2, 2, 32, wide=False, seed=2),
    "4 bits, minimums": make(4, None, 32, wide=False, seed=3),
    "5 bits, minimums, float32": make(5, None, 16, wide=True, seed=4),
    "6 bits, float32": make(6, 32, 16, wide=True, seed=5),
    "8 bits, groups of 64": make(8, 128, 64, wide=False, seed=6),
    "8 bits, rows": make(8, 128, 1000, wide=False, seed=7),
}


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations_with_replacement(GRIDS, 2)])
def test_a_common_kind_keeps_every_number(first, second):
    grids = [GRIDS[first], GRIDS[second]]
    kind = common_kind([grid.kind for grid in grids])
    assert kind is not None
    for grid in grids:
        held = grid.to(kind)
        assert held.kind.bits == kind.bits and held.levels.max() < 1 << kind.bits
        assert (held.minimums is not None) == kind.has_minimums and held.group == (kind.group or NUM_IN)
        np.testing.assert_array_equal(held.weight(), grid.weight())
    if first == second:
        assert kind == grids[0].kind


def test_grids_that_have_no_kind_in_common():
    """Orders differ; or a scale of 24 bits times a level, and a minimum, would be rounded twice."""
    ordered = make(4, 8, 32, wide=False, order=True)
    assert common_kind([ordered.kind, GRIDS["4 bits"].kind]) is None
    assert common_kind([ordered.kind, make(4, 8, 32, wide=False, seed=9, order=True).kind]) is None
    assert common_kind([ordered.kind, ordered.kind]) == ordered.kind
    fine = make(4, 8, 32, wide=True)
    fine = Grid(fine.levels, np.nextafter(fine.scales, np.float32(9)), 32, 4, 8)
    assert fine.kind.scale_bits == 24
    assert common_kind([fine.kind, GRIDS["8 bits, rows"].kind]) is not None
    assert common_kind([fine.kind, GRIDS["4 bits, minimums"].kind]) is None


@pytest.mark.parametrize(("value", "bits"), [(1.0, 1), (0.0, 1), (3.0, 2), (-2.5, 3), (1 + 2**-23, 24)])
def test_significant_bits(value, bits):
    assert significant_bits(np.array([[1.0, value]], np.float32)) == bits


def test_significant_bits_of_a_denormal():
    """Given by its bits: a process that has used ONNX Runtime may take a denormal for 0."""
    assert significant_bits(np.array([[1]], np.uint32).view(np.float32)) == 24


@pytest.mark.parametrize("name", GRIDS)
def test_outputs_are_taken_and_others_are_zeros(name):
    grid = GRIDS[name]
    taken = grid.take(np.array([3, -1, 0, 3])).weight()
    np.testing.assert_array_equal(taken, [grid.weight()[3], np.zeros(NUM_IN), grid.weight()[0], grid.weight()[3]])


def test_the_bytes_of_a_kind():
    assert GRIDS["4 bits"].kind.num_bytes(5, NUM_IN) == 5 * (NUM_IN // 2 + 3 * 2)
    assert GRIDS["5 bits, minimums, float32"].kind.num_bytes(5, NUM_IN) == 5 * (NUM_IN + 6 * 8)
    assert GRIDS["8 bits, rows"].kind.num_bytes(5, NUM_IN) == 5 * (NUM_IN + 2)
    assert str(GRIDS["4 bits, minimums"].kind) == "4 bits, float16 scale and minimum for 32 inputs"
    assert str(GRIDS["8 bits, rows"].kind) == "8 bits, float16 scale for all inputs"
