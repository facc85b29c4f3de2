# SPDX-License-Identifier: Apache-2.0
"""Weights on the grid on which a checkpoint has them, or on which a build puts them: levels, scales and minimums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Grid:
    """Quantised weights of a linear: scale * (level - zero) + minimum, in float32 and in this order.

    Args:
        levels: [out, in] uint8, below 2^bits.
        scales: [out, groups] float16 or float32; group g has inputs g * group to (g + 1) * group - 1.
        group: inputs that share a scale: 16, 32, 64 or another multiple of 32, or all of a row.
        bits: 2 to 8; how many bits the levels need.
        zero: the level of 0 where the grid is symmetric; 0 where there are minimums.
        minimums: [out, groups] of the scales' dtype, the value of level 0; None: none. A zero point z is the minimum
            -z * scale, which float32 holds exactly where scales have at most 16 significant bits.
        order: [in] int32, the input whose weights stand at each position of `levels`; None: as they are.
    """

    levels: NDArray[np.uint8]
    scales: Array
    group: int
    bits: int
    zero: int = 0
    minimums: Array | None = None
    order: NDArray[np.int32] | None = None

    def weight(self) -> NDArray[np.float32]:
        """Returns the weights that the grid stands for, [out, in] float32, inputs in their own order."""
        num_in = self.levels.shape[1]

        def spread(values: Array) -> NDArray[np.float32]:
            return np.repeat(values.astype(np.float32), self.group, axis=1)[:, :num_in]

        weight = (self.levels.astype(np.float32) - np.float32(self.zero)) * spread(self.scales)
        if self.minimums is not None:
            weight += spread(self.minimums)
        if self.order is not None:
            ordered = np.empty_like(weight)
            ordered[:, self.order] = weight
            return ordered
        return weight

    def take(self, rows: NDArray[np.integer[Any]]) -> Grid:
        """Returns these outputs in this order; -1 is an output of zeros."""
        is_padding = (rows < 0)[:, None]
        levels = np.where(is_padding, np.uint8(self.zero), self.levels[rows])
        scales = np.where(is_padding, self.scales.dtype.type(0), self.scales[rows])
        minimums = None
        if self.minimums is not None:
            minimums = np.where(is_padding, self.minimums.dtype.type(0), self.minimums[rows])
        return replace(self, levels=levels, scales=scales, minimums=minimums)
