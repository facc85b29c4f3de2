# SPDX-License-Identifier: Apache-2.0
"""Weights packed for the CPU kernels: panels of 32 output columns, contiguous along the input.

Columns are padded to 32 and rows to a unit of the form, both with zeros. Grids with minimums are scale * level +
minimum:

| form | weights | scales |
|---|---|---|
| F32 | float32 [panels, K, 32] | |
| Bf16 | bfloat16 [panels, K / 2, 32, 2] | |
| Int8 | uint8 [panels, K / 32, 8, 32, 4], level + 128 | float16 or float32 [panels, K / group, 32] |
| Int4 | uint8 [panels, K / 32, 4, 32, 4], level + 8 | the same |
| Int8Min | as Int8, the level itself | the same, and minimums like them |
| Int4Min | as Int4, the level itself | the same, and minimums like them |

A quad is four neighbours along the input; the low nibbles of Int4 are quad 2j of 32, the high ones quad 2j + 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.ops.grid import Grid

COLUMNS = 32  # of a panel
GROUP = 32  # rows of a layout's step, and those with one scale where nothing else is said
FORMS = ("F32", "Bf16", "Int8", "Int4", "Int8Min", "Int4Min")
UNITS = {"F32": 1, "Bf16": 2, **dict.fromkeys(FORMS[2:], GROUP)}  # rows are padded to a multiple
DTYPES = {"F32": "float32", "Bf16": "bfloat16", **dict.fromkeys(FORMS[2:], "uint8")}
ZEROS = {"Int8": 128, "Int4": 8, "Int8Min": 0, "Int4Min": 0}  # the stored number of level 0

Array = NDArray[Any]


@dataclass(frozen=True)
class Packed:
    """Packed weights. `unit`: neighbours in a row of activations that share one, 16 or 32; an attribute of the op."""

    weights: Array
    scales: Array | None = None  # [panels, groups, 32]; None where the form has none
    minimums: Array | None = None  # like the scales; None where the form has none
    group: int = GROUP  # rows that share a scale, a multiple of `unit`
    unit: int = GROUP

    @property
    def attributes(self) -> dict[str, int]:
        """The attributes of an op with these weights, but for those that have their default."""
        return {name: value for name, value in (("group", self.group), ("unit", self.unit)) if value != GROUP}

    @property
    def constants(self) -> dict[str, Array]:
        named = {"weights": self.weights, "scales": self.scales, "minimums": self.minimums}
        return {name: array for name, array in named.items() if array is not None}


def is_integer(form: str) -> bool:
    return form in ZEROS


def is_int4(form: str) -> bool:
    return form.startswith("Int4")


def has_minimums(form: str) -> bool:
    return form.endswith("Min")


def interleave_gate(weight: Array) -> Array:
    """Returns weights [K, N], gate and up side by side, reordered to panels of 16 gate and their 16 up columns.

    Each half is padded with zeros to a multiple of 16.
    """
    num_in, num_out = weight.shape
    half, width = num_out // 2, COLUMNS // 2
    padding = ((0, 0), (0, -half % width))
    parts = [np.pad(part, padding).reshape(num_in, -1, width) for part in (weight[:, :half], weight[:, half:])]
    return np.concatenate(parts, axis=2).reshape(num_in, -1)


def gate_columns(num_out: int) -> NDArray[np.int64]:
    """Returns which column, or -1 for zeros, stands at each place of `interleave_gate`."""
    return interleave_gate(np.arange(1, num_out + 1)[None])[0] - 1


def packed_dims(num_in: int, num_out: int, form: str, *, has_gate: bool = False) -> tuple[int, ...]:
    """Returns the dims of packed weights; with a gate, each half of the columns is padded to a multiple of 16."""
    columns = -(-num_out // 2 // (COLUMNS // 2)) * COLUMNS if has_gate else num_out
    panels, rows = -(-columns // COLUMNS), -(-num_in // UNITS[form]) * UNITS[form]
    inner = {"F32": (rows, COLUMNS), "Bf16": (rows // 2, COLUMNS, 2)}
    return (panels, *inner.get(form, (rows // GROUP, 4 if is_int4(form) else 8, COLUMNS, 4)))


def _padded(weight: Array, form: str) -> Array:
    num_in, num_out = weight.shape
    return np.pad(weight, ((0, -num_in % UNITS[form]), (0, -num_out % COLUMNS)))


def pack(weight: Array, form: str) -> Packed:
    """Packs weights [K, N] float32 (of Bf16: bfloat16 or float32, which is rounded); see the module for the layouts."""
    padded = _padded(weight, form)
    rows, panels = padded.shape[0], padded.shape[1] // COLUMNS
    if form == "F32":
        return Packed(np.ascontiguousarray(padded.reshape(rows, panels, COLUMNS).transpose(1, 0, 2), np.float32))
    if form == "Bf16":
        import ml_dtypes

        pairs = padded.astype(ml_dtypes.bfloat16).reshape(rows // 2, 2, panels, COLUMNS)
        return Packed(np.ascontiguousarray(pairs.transpose(2, 0, 3, 1)))
    levels, scales = quantize_groups(padded.astype(np.float32, copy=False), form)
    return pack_levels(levels, scales, form)


def grid_form(grid: Grid) -> str:
    """Returns the form that holds a grid: Int4 where levels fit, else Int8, with minimums where the grid has them."""
    least, most = -grid.zero, (1 << grid.bits) - 1 - grid.zero
    if grid.minimums is None and least >= -8 and most <= 7:
        return "Int4"
    if grid.minimums is None and least >= -128 and most <= 127:
        return "Int8"
    return "Int4Min" if grid.bits <= 4 else "Int8Min"


def grid_unit(grid: Grid, unit: int = GROUP) -> int:
    """Returns the unit of activations for a grid: 16 where that is asked for, or where its group is no multiple of 32.

    Raises:
        ValueError: a group that is neither a multiple of 16 nor all of a row.
    """
    if grid.group >= grid.levels.shape[1]:
        return unit
    if grid.group % 16:
        raise ValueError(f"a grid with groups of {grid.group}; expected a multiple of 16, or all of a row")
    return unit if grid.group % unit == 0 else 16


def pack_grid(grid: Grid, *, unit: int = GROUP) -> tuple[str, Packed]:
    """Packs weights as they are on their grid; returns the form and what `unpack` gives the bits of `grid.weight()` of.

    Args:
        grid: with an order, inputs stay where its levels have them: the caller gathers x by the order.
        unit: of activations, 32 or 16.
    """
    form, num_in = grid_form(grid), grid.levels.shape[1]
    scales, minimums = grid.scales, grid.minimums
    if minimums is None and has_minimums(form):  # levels without a sign that fill their bits
        scales = scales.astype(np.float32)
        minimums = scales * np.float32(-grid.zero)
    moved = grid.levels + np.uint8(0 if has_minimums(form) else (ZEROS[form] - grid.zero) & 255)  # modulo 256
    columns = -len(moved) % COLUMNS
    stored = np.pad(moved.T, ((0, -num_in % GROUP), (0, columns)), constant_values=ZEROS[form])

    def in_panels(values: Array) -> Array:
        return _scales_in_panels(np.pad(values.T, ((0, 0), (0, columns))))

    in_form = None if minimums is None else in_panels(minimums)
    group = grid.group if grid.group < num_in else -(-num_in // GROUP) * GROUP
    packed = Packed(_pack_stored(stored, form), in_panels(scales), in_form, group, grid_unit(grid, unit))
    return form, packed


def pack_experts(weights: Iterable[Array], form: str, *, has_gate: bool = False) -> Packed:
    """Packs the weights of experts one by one; all parts get a first dim of experts, and a gate is interleaved."""
    whole: list[Array] = []
    steps: list[Array] = []
    for weight in weights:
        packed = pack(interleave_gate(weight) if has_gate else weight, form)
        whole.append(packed.weights)
        if packed.scales is not None:
            steps.append(packed.scales)
    return Packed(np.stack(whole), np.stack(steps) if steps else None)


def pack_scales(weight: Array, form: str) -> Array:
    """Returns the scales of `pack` alone."""
    groups = (
        _padded(weight, form)
        .astype(np.float32, copy=False)
        .reshape(-1, GROUP, -(-weight.shape[1] // COLUMNS) * COLUMNS)
    )
    return _scales_in_panels(group_scales(groups, form))


def _scales_in_panels(scales: Array) -> Array:
    groups, columns = scales.shape
    return np.ascontiguousarray(scales.reshape(groups, columns // COLUMNS, COLUMNS).transpose(1, 0, 2))


def group_scales(groups: Array, form: str) -> Array:
    """Returns the scales [groups, N] float16 of weights [groups, 32, N] float32; see `quantize_groups`."""
    most = np.float32(65504)
    if form == "Int8":
        scale = np.abs(groups).max(axis=1) / np.float32(127)
    else:
        index = np.abs(groups).argmax(axis=1, keepdims=True)
        scale = np.take_along_axis(groups, index, axis=1)[:, 0] / np.float32(-8)
    return np.clip(scale, -most, most).astype(np.float16)


def quantize_groups(weight: Array, form: str) -> tuple[Array, Array]:
    """Quantises weights [K, N] float32, K a multiple of 32, in groups of 32 rows to the nearest level.

    Args:
        form: Int8: levels -127 to 127, the largest magnitude is 127; Int4: -8 to 7, the largest magnitude is -8.

    Returns:
        [K, N] int8 levels and [K / 32, N] float16 scales; a scale may be negative.
    """
    groups = weight.reshape(-1, GROUP, weight.shape[1])
    scales = group_scales(groups, form)
    levels = levels_from_groups(groups, scales[:, None].astype(np.float32), form)
    return levels.reshape(weight.shape), scales


def levels_from_groups(groups: Array, scales: Array, form: str) -> Array:
    """Returns int8 levels [groups, 32, N] of weights [groups, 32, N] for scales [groups, 1, N] float32."""
    least, most = (-127, 127) if form == "Int8" else (-8, 7)
    ratio = np.divide(groups, scales, out=np.zeros_like(groups), where=scales != 0)
    return np.clip(np.rint(ratio), least, most).astype(np.int8)


def pack_levels(levels: Array, scales: Array, form: str) -> Packed:
    """Packs levels [K, N] int8 and scales [K / 32, N] float16, where K and N are multiples of 32."""
    return Packed(
        _pack_stored((levels.astype(np.int16) + ZEROS[form]).astype(np.uint8), form), _scales_in_panels(scales)
    )


def _pack_stored(stored: Array, form: str) -> Array:
    rows, columns = stored.shape
    groups, panels = rows // GROUP, columns // COLUMNS
    if is_int4(form):
        nibbles = stored.reshape(groups, 4, 2, 4, panels, COLUMNS)
        quads: Array = nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)
    else:
        quads = stored.reshape(groups, 8, 4, panels, COLUMNS)
    return np.ascontiguousarray(quads.transpose(3, 0, 1, 4, 2))


def unpack_levels(weights: Array, form: str) -> Array:
    """Returns the levels [K, N] int16 of packed weights, padding included."""
    if is_int4(form):
        low, high = weights & 15, weights >> 4
        quads = np.stack([low, high], axis=3).reshape(*weights.shape[:2], 8, *weights.shape[3:])
    else:
        quads = weights
    panels, groups = quads.shape[:2]
    levels: Array = quads.astype(np.int16) - ZEROS[form]
    return levels.transpose(1, 2, 4, 0, 3).reshape(groups * GROUP, panels * COLUMNS)


def spread(values: Array, group: int, size: int, count: int) -> Array:
    """Returns scales or minimums [panels, groups, 32] as float32 [count, N], of units of `size` rows each."""
    by_group = values.astype(np.float32).transpose(1, 0, 2).reshape(values.shape[1], -1)
    return by_group[np.minimum(np.arange(count) * size // group, len(by_group) - 1)]


def unpack(packed: Packed, form: str) -> Array:
    """Returns the weights [K, N] float32 that the kernel multiplies with; padding is zeros, or a form's minimums."""
    weights = packed.weights
    if form == "F32":
        return weights.transpose(1, 0, 2).reshape(weights.shape[1], -1)
    if form == "Bf16":
        panels, pairs = weights.shape[:2]
        return weights.astype(np.float32).transpose(1, 3, 0, 2).reshape(pairs * 2, panels * COLUMNS)
    assert packed.scales is not None
    levels = unpack_levels(weights, form).astype(np.float32)
    weight: Array = levels * spread(packed.scales, packed.group, 1, len(levels))
    if packed.minimums is not None:
        weight += spread(packed.minimums, packed.group, 1, len(levels))
    return weight
