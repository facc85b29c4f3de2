# SPDX-License-Identifier: Apache-2.0
"""Weights on the grid on which a checkpoint has them, or on which a build puts them: levels, scales and minimums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_SIGNIFICANT = 24  # bits of float32


@dataclass(frozen=True)
class GridKind:
    """What the outputs of a grid have in common."""

    bits: int
    zero: int
    group: int  # see `Grid`; 0: all of a row
    has_minimums: bool
    is_wide: bool  # scales and minimums are float32; else float16
    scale_bits: int
    order: bytes = b""  # bytes of the order of inputs; empty: as they are

    def num_bytes(self, num_out: int, num_in: int) -> int:
        """Returns the bytes of levels, in 4 or 8 bits, scales and minimums."""
        groups = -(-num_in // (self.group or num_in)) * (4 if self.is_wide else 2) * (1 + self.has_minimums)
        return num_out * (num_in // (2 if self.bits <= 4 else 1) + groups)

    def __str__(self) -> str:
        sign = "scale and minimum" if self.has_minimums else "scale"
        return f"{self.bits} bits, {'float32' if self.is_wide else 'float16'} {sign} for {self.group or 'all'} inputs"


def common_kind(kinds: Sequence[GridKind]) -> GridKind | None:
    """Returns the kind that holds outputs of all these, their values unchanged; None where there is none."""
    group = math.gcd(*(kind.group for kind in kinds))
    if len({kind.order for kind in kinds}) > 1:
        return None
    has_minimums = any(kind.has_minimums for kind in kinds)
    # A product of level and scale that float32 holds, plus one of zero and scale, is that of their difference.
    if has_minimums and any(k.scale_bits + k.bits > _SIGNIFICANT for k in kinds if not k.has_minimums):
        return None
    zero = 0 if has_minimums else max(kind.zero for kind in kinds)
    most = max((1 << k.bits) - 1 + (0 if has_minimums else zero - k.zero) for k in kinds)
    # -zero * scale may be too large for float16.
    is_wide = any(kind.is_wide or kind.has_minimums != has_minimums for kind in kinds)
    scale_bits = max(kind.scale_bits for kind in kinds)
    return GridKind(most.bit_length(), zero, group, has_minimums, is_wide, scale_bits, kinds[0].order)


class GridSource(Protocol):
    """A checkpoint some of whose tensors are grids, see `checkpoints.tensor_files.TensorFiles`."""

    @property
    def grid_keys(self) -> tuple[str, ...]: ...

    def grid(self, key: str) -> Grid | None:
        """Returns the grid of a tensor, its outputs as rows; None: it has none."""
        ...


def has_float16(values: Array) -> bool:
    """Returns whether float16 holds every one of these float32 numbers."""
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())


def significant_bits(values: Array) -> int:
    """Returns the most significant bits that a number of these has; of one below 2^-126 at most 24."""
    mantissas = np.bitwise_or.reduce(values.astype(np.float32).view(np.uint32), axis=None) & 0x7FFFFF
    return _SIGNIFICANT - ((int(mantissas) & -int(mantissas)).bit_length() - 1 if mantissas else 23)


@dataclass(frozen=True)
class Grid:
    """Quantised weights of a linear: scale * (level - zero) + minimum, in float32 and in this order.

    Args:
        minimums: [out, groups] of the scales' dtype, the value of level 0; None: none. A zero point z is the minimum -z
            * scale, which float32 holds exactly where scales have at most 16 significant bits.
        order: [in] int32, the input whose weights stand at each position of `levels`; None: as they are.
    """

    levels: NDArray[np.uint8]  # [out, in] uint8, below 2^bits
    scales: Array  # [out, groups] float16 or float32; group g has inputs g * group to (g + 1) * group - 1
    group: int  # inputs that share a scale: 16, 32, 64 or another multiple of 32, or all of a row
    bits: int  # 2 to 8; how many bits the levels need
    zero: int = 0  # the level of 0 where the grid is symmetric; 0 where there are minimums
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

    @property
    def kind(self) -> GridKind:
        order = b"" if self.order is None else self.order.tobytes()
        group, is_wide = 0 if self.group >= self.levels.shape[1] else self.group, self.scales.dtype == np.float32
        bits = significant_bits(self.scales)
        return GridKind(self.bits, self.zero, group, self.minimums is not None, bool(is_wide), bits, order)

    def to(self, kind: GridKind) -> Grid:
        """Returns the same weights in a kind that `common_kind` found for this one and others."""
        num_in = self.levels.shape[1]
        group = kind.group or num_in
        group_of = np.arange(0, num_in, group) // self.group
        dtype = np.float32 if kind.is_wide else np.float16
        scales, minimums = self.scales[:, group_of].astype(dtype), None
        levels = self.levels
        if kind.has_minimums:
            held = -np.float32(self.zero) * self.scales.astype(np.float32) if self.minimums is None else self.minimums
            minimums = held[:, group_of].astype(dtype)
        elif kind.zero != self.zero:
            levels = levels + np.uint8(kind.zero - self.zero)
        return Grid(levels, scales, group, kind.bits, kind.zero, minimums, self.order)
