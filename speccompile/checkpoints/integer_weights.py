# SPDX-License-Identifier: Apache-2.0
"""Packed weights of integers with scales and zero points, as float32 and as a grid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speccompile.ops.grid import Grid, has_float16

_EXACT_BITS = 16  # significant bits of a scale whose product with a level of 8 bits float32 holds


@dataclass(frozen=True)
class IntegerWeight:
    """A weight [out, in]: scale * (level - zero)."""

    levels: NDArray[np.uint8]  # [out, in] uint8
    zeros: NDArray[np.int32]  # [out, groups] int32
    scales: NDArray[np.float32]  # [out, groups] float32
    group_of: NDArray[np.int64]  # [in], the group of each input
    bits: int

    def weight(self) -> NDArray[np.float32]:
        differences = (self.levels - self.zeros[:, self.group_of]).astype(np.float32)
        weight: NDArray[np.float32] = differences * self.scales[:, self.group_of]
        return weight

    def grid(self) -> Grid | None:
        """Returns the grid that has the same numbers; None where there is none.

        One zero for all makes a symmetric grid; others are minimums where exact, else level - zero of 8 bits.
        """
        held = self._in_order()
        if held is None:
            return None
        levels, group, repeats, order = held
        zeros, scales = (np.repeat(values, repeats, axis=1) for values in (self.zeros, self.scales))
        bits, first = self.bits, int(zeros.flat[0])
        fits = 128 if bits > 4 else 8
        if (zeros == first).all() and (1 << bits) - fits <= first <= fits:
            kind = np.float16 if has_float16(scales) else np.float32
            return Grid(levels, scales.astype(kind), group, bits, first, order=order)
        if not np.isfinite(scales).all():
            return None
        if not (scales.view(np.uint32) & ((1 << (24 - _EXACT_BITS)) - 1)).any():
            minimums = -zeros * scales
            kind = np.float16 if has_float16(scales) and has_float16(minimums) else np.float32
            minimums = minimums.astype(kind)
            return Grid(levels, scales.astype(kind), group, bits, minimums=minimums, order=order)
        spread = np.repeat(zeros, group, axis=1)[:, : levels.shape[1]]
        differences = levels.astype(np.int16) - spread
        if differences.min() < -128 or differences.max() > 127:
            return None
        return Grid((differences + 128).astype(np.uint8), scales, group, bits=8, zero=128, order=order)

    def _in_order(self) -> tuple[NDArray[np.uint8], int, int, NDArray[np.int32] | None] | None:
        num_in, num_groups = len(self.group_of), self.scales.shape[1]
        order = np.argsort(self.group_of, kind="stable").astype(np.int32)
        counts = np.bincount(self.group_of, minlength=num_groups)
        size = int(counts.max())
        if (self.group_of[order] != np.arange(num_in) // size).any() or -(-num_in // size) != num_groups:
            return None
        whole = size >= num_in
        if size % 16 and not whole:
            return None
        repeats = 1 if whole or size == 16 or size % 32 == 0 else size // 16
        if (order == np.arange(num_in)).all():
            return self.levels, size // repeats, repeats, None
        return self.levels[:, order], size // repeats, repeats, order
