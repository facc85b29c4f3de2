# SPDX-License-Identifier: Apache-2.0
"""Forms of the attention ops whose caches are int8: levels -127 ... 127, a float32 scale for 32 columns of a row.

A step's rows are quantised when they are written, and the step itself reads them from the caches: so a chain sees what
single steps see.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.dims import INT8_CACHE_GROUP as GROUP
from speccompile.core.specs import TensorSpec
from speccompile.core.tree import Floats
from speccompile.ops.cached_attention import CACHED_ATTENTION, LATENT_ATTENTION, SHARED_ATTENTION, SINK_ATTENTION
from speccompile.ops.cross_attention import CROSS_ATTENTION, ROTARY_CROSS_ATTENTION
from speccompile.ops.op import Op
from speccompile.ops.qkv_attention import QKV_ATTENTION

Levels = NDArray[np.int8]
LEAST_PEAK = 1e-30  # a group whose largest magnitude is smaller has levels of 0


def spread_scales(scales: Floats, width: int) -> Floats:
    """Returns the scale of each column, [..., width]."""
    return np.repeat(scales, GROUP, axis=-1)[..., :width]


def quantize_rows(rows: Floats) -> tuple[Levels, Floats]:
    """Returns levels, ties to even, and scales peak / 127 [..., groups] float32, NaN where a group is not finite."""
    with np.errstate(invalid="ignore"):
        starts = range(0, rows.shape[-1], GROUP)
        peak = np.maximum.reduceat(np.abs(rows), starts, axis=-1)
        fault = np.add.reduceat(rows * np.float32(0), starts, axis=-1)
        scales = np.where(peak < LEAST_PEAK, np.float32(0), peak / np.float32(127)) + fault
        divisors = np.where(peak < LEAST_PEAK, np.float32(1), scales)
        levels = np.rint(rows / spread_scales(divisors, rows.shape[-1]))
        return np.nan_to_num(levels).astype(np.int8), scales.astype(np.float32)


# The sum is NaN where a number of the row is not finite, which a maximum may not show.
QUANTIZE_ROWS = Op(
    "QuantizeRows",
    (TensorSpec("rows", ("batch", "kv_heads", "nodes", "head_dim"), "float32"),),
    (
        TensorSpec("levels", ("batch", "kv_heads", "nodes", "head_dim"), "int8"),
        TensorSpec("scales", ("batch", "kv_heads", "nodes", "groups"), "float32"),
    ),
    quantize_rows,
    f"""
    width = Shape(rows, start=3)
    padded = Pad(rows, Concat([0], Mod(-width, [{GROUP}]), axis=0), 0.0, [3])
    parts = Reshape(padded, [0, 0, 0, -1, {GROUP}])
    peak = ReduceMax(Abs(parts), [-1], keepdims=1)
    is_small = peak < {LEAST_PEAK}
    sizes = Where(is_small, 0.0, peak / 127.0) + ReduceSum(parts * 0.0, [-1], keepdims=1)
    all_levels = Round(parts / Where(is_small, 1.0, sizes))
    levels = int8(Slice(Reshape(all_levels, [0, 0, 0, -1]), [0], width, [3]))
    scales = Squeeze(sizes, [4])
    """,
)


@dataclass(frozen=True)
class Int8Rows:
    """A cache for the twins of float caches: rows are quantised when they are set, and read as floats."""

    levels: Levels
    scales: Floats

    @property
    def shape(self) -> tuple[int, ...]:
        return self.levels.shape

    def copy(self) -> Int8Rows:
        return Int8Rows(self.levels.copy(), self.scales.copy())

    def __setitem__(self, index: Any, rows: Floats) -> None:
        self.levels[index], self.scales[index] = quantize_rows(rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        del copy
        return np.asarray(self.levels.astype(np.float32) * spread_scales(self.scales, self.shape[-1]), dtype)


def _tensors(tensors: Iterable[TensorSpec], ending: str, scale: str) -> tuple[TensorSpec, ...]:
    made: list[TensorSpec] = []
    for tensor in tensors:
        head, is_cache = tensor.name[:1], tensor.name in (f"k{ending}", f"v{ending}")
        made.append(replace(tensor, dtype="int8") if is_cache else tensor)
        if is_cache:
            made.append(TensorSpec(head + scale, (*tensor.dims[:-1], "groups"), "float32"))
    return tuple(made)


def _twin(op: Op, names: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    def twin(*inputs: NDArray[Any], **attributes: Any) -> tuple[Any, ...]:
        given: list[Any] = []
        for name, value in zip(names, inputs, strict=False):
            given.append(Int8Rows(given.pop(), value) if name.endswith("_scale") else value)
        made = op.twin(*given, **attributes)
        parts = ((out.levels, out.scales) if isinstance(out, Int8Rows) else (out,) for out in made)
        return tuple(part for group in parts for part in group)

    return twin


_SCATTER = re.compile(r'([kv])_updated = TensorScatter\(\1_cache, (\w+), lengths, axis=2, mode="linear"\)')
_FLOATS = f"float32({{0}}) * Gather({{1}}, Range(0, Squeeze(Shape({{0}}, start=3)), 1) / {GROUP}, axis=3)"
_QUANTIZED = r"""\1_levels, \1_step = speccompile.QuantizeRows(\2)
    \1_updated = TensorScatter(\1_cache, \1_levels, lengths, axis=2, mode="linear")
    \1_scale_updated = TensorScatter(\1_scale, \1_step, lengths, axis=2, mode="linear")
    \1_rows = """ + _FLOATS.format(r"\1_updated", r"\1_scale_updated")


def _body(op: Op) -> str:
    body = re.sub(r"\b([kv])_updated\b(?! =)", r"\1_rows", op.body)
    if _SCATTER.search(body):
        return _SCATTER.sub(_QUANTIZED, body)
    read = "".join(f"    {n}_rows = {_FLOATS.format(f'{n}_cache', f'{n}_scale')}\n" for n in "kv")
    return "\n" + read + re.sub(r"\b([kv])_cache\b", r"\1_rows", body)


def int8_op(op: Op) -> Op:
    """Returns the form of an attention op: scales [batch, kv_heads, rows, groups] float32 follow each cache."""
    inputs = _tensors(op.inputs, "_cache", "_scale")
    outputs = _tensors(op.outputs, "_updated", "_scale_updated")
    uses = (QUANTIZE_ROWS.name, *op.uses) if len(outputs) > 1 else op.uses
    twin = _twin(op, tuple(t.name for t in inputs))
    return Op(f"Int8{op.name}", inputs, outputs, twin, _body(op), op.attributes, uses)


# By the op whose caches are floats.
INT8_ATTENTION: dict[str, Op] = {
    op.name: int8_op(op)
    for op in (
        CACHED_ATTENTION,
        SINK_ATTENTION,
        LATENT_ATTENTION,
        SHARED_ATTENTION,
        CROSS_ATTENTION,
        ROTARY_CROSS_ATTENTION,
        *QKV_ATTENTION.values(),
    )
}
