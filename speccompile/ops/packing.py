# SPDX-License-Identifier: Apache-2.0
"""Weights packed for the CPU kernels: panels of 32 output columns, contiguous along the input.

Columns are padded to 32 and rows to a unit of the form, both with zeros. Two forms hold the weights as they are, two
quantise them in groups of 32 along the input:

| form | weights | scales |
|---|---|---|
| F32 | float32 [panels, K, 32] | |
| Bf16 | bfloat16 [panels, K / 2, 32, 2] | |
| Int8 | uint8 [panels, K / 32, 8, 32, 4], level + 128 | float16 [panels, K / 32, 32] |
| Int4 | uint8 [panels, K / 32, 4, 32, 4], level + 8 | float16 [panels, K / 32, 32] |

A quad is four neighbours along the input; the low nibbles of Int4 are quad 2j of a group, the high ones quad 2j + 1.
Scales are rounded to float16 before levels are computed, so the levels fit the scales that are stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLUMNS = 32  # of a panel
GROUP = 32  # rows with one scale
FORMS = ("F32", "Bf16", "Int8", "Int4")
UNITS = {"F32": 1, "Bf16": 2, "Int8": GROUP, "Int4": GROUP}  # rows are padded to a multiple
DTYPES = {"F32": "float32", "Bf16": "bfloat16", "Int8": "uint8", "Int4": "uint8"}
ZEROS = {"Int8": 128, "Int4": 8}  # the stored number of level 0

Array = NDArray[Any]


@dataclass(frozen=True)
class Packed:
    """Packed weights.

    Args:
        weights: see the module.
        scales: float16 [panels, groups, 32]; None where the form has none.
    """

    weights: Array
    scales: Array | None = None


def is_integer(form: str) -> bool:
    """Returns whether weights and activations are integers with scales."""
    return form in ZEROS


def interleave_gate(weight: Array) -> Array:
    """Returns [K, N] with gate and up side by side reordered to panels of 16 gate and their 16 up columns.

    Args:
        weight: [K, N], N / 2 columns of gate, then as many of up; each half is padded with zeros to a multiple of 16.
    """
    num_in, num_out = weight.shape
    half, width = num_out // 2, COLUMNS // 2
    padding = ((0, 0), (0, -half % width))
    parts = [np.pad(part, padding).reshape(num_in, -1, width) for part in (weight[:, :half], weight[:, half:])]
    return np.concatenate(parts, axis=2).reshape(num_in, -1)


def packed_dims(num_in: int, num_out: int, form: str, *, has_gate: bool = False) -> tuple[int, ...]:
    """Returns the dims of packed weights; with a gate, each half of the columns is padded to a multiple of 16."""
    columns = -(-num_out // 2 // (COLUMNS // 2)) * COLUMNS if has_gate else num_out
    panels, rows = -(-columns // COLUMNS), -(-num_in // UNITS[form]) * UNITS[form]
    inner = {
        "F32": (rows, COLUMNS),
        "Bf16": (rows // 2, COLUMNS, 2),
        "Int8": (rows // GROUP, 8, COLUMNS, 4),
        "Int4": (rows // GROUP, 4, COLUMNS, 4),
    }
    return (panels, *inner[form])


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


def pack_experts(weights: Iterable[Array], form: str, *, has_gate: bool = False) -> Packed:
    """Packs the weights of experts one by one; all parts get a first dim of experts.

    Args:
        weights: of each, see `pack`.
        form: of the result.
        has_gate: gate and up stand side by side and are interleaved.
    """
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
    """Quantises weights in groups of 32 rows to the nearest level.

    Args:
        weight: [K, N] float32, K a multiple of 32.
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
    rows, columns = levels.shape
    groups, panels = rows // GROUP, columns // COLUMNS
    stored = (levels.astype(np.int16) + ZEROS[form]).astype(np.uint8)
    if form == "Int8":
        quads: Array = stored.reshape(groups, 8, 4, panels, COLUMNS)
    else:
        nibbles = stored.reshape(groups, 4, 2, 4, panels, COLUMNS)
        quads = nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)
    weights = np.ascontiguousarray(quads.transpose(3, 0, 1, 4, 2))
    return Packed(weights, _scales_in_panels(scales))


def padded_levels(levels: Array, scales: Array) -> tuple[Array, Array]:
    """Returns levels and scales for `pack_levels`, padded with zeros.

    Args:
        levels: [K, N] int8.
        scales: [K / 32 rounded up, N] float16.
    """
    columns = (0, -levels.shape[1] % COLUMNS)
    return np.pad(levels, ((0, -len(levels) % GROUP), columns)), np.pad(scales, ((0, 0), columns))


def unpack_levels(weights: Array, form: str) -> Array:
    """Returns the levels [K, N] int8 of packed weights, padding included."""
    if form == "Int4":
        low, high = weights & 15, weights >> 4
        quads = np.stack([low, high], axis=3).reshape(*weights.shape[:2], 8, *weights.shape[3:])
    else:
        quads = weights
    panels, groups = quads.shape[:2]
    levels: Array = quads.astype(np.int16) - ZEROS[form]
    return levels.transpose(1, 2, 4, 0, 3).reshape(groups * GROUP, panels * COLUMNS).astype(np.int8)


def unpack(packed: Packed, form: str) -> Array:
    """Returns the weights [K, N] float32 that the kernel multiplies with, padding included."""
    weights = packed.weights
    if form == "F32":
        return weights.transpose(1, 0, 2).reshape(weights.shape[1], -1)
    if form == "Bf16":
        panels, pairs = weights.shape[:2]
        return weights.astype(np.float32).transpose(1, 3, 0, 2).reshape(pairs * 2, panels * COLUMNS)
    assert packed.scales is not None
    scales = packed.scales.astype(np.float32).transpose(1, 0, 2).reshape(packed.scales.shape[1], -1)
    return unpack_levels(weights, form).astype(np.float32) * scales.repeat(GROUP, axis=0)
