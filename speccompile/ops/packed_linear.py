# SPDX-License-Identifier: Apache-2.0
"""Linears whose weights are packed for the CPU kernels (`plugins/cpu/linear.h`): four ops in six forms.

PackedLinear is x W + bias. NormPackedLinear adds a residual and normalises before, GatedPackedLinear applies a gate
after, NormGatedPackedLinear does both. Forms F32 and Bf16 compute in float32; the others quantise each row of
activations in units of 32 or 16 and add exact integer products of a unit, and with minimums each minimum times the
unit's sum. A row's numbers depend on that row alone.

The bodies unpack the constant weights (ONNX Runtime does it once, at load) and use MatMul or MatMulNBits (blocks of a
unit, accuracy level 4), whose arithmetic is that of the integer forms. MatMulNBits has a zero point of half the levels:
a minimum is what it is more than that, times the sums of the rounded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from speccompile.core.specs import TensorSpec
from speccompile.core.tree import Floats
from speccompile.ops.op import Op
from speccompile.ops.packed_bodies import GATE, NORM, block_product, nibbles
from speccompile.ops.packing import (
    COLUMNS,
    DTYPES,
    FORMS,
    GROUP,
    Packed,
    has_minimums,
    is_int4,
    is_integer,
    spread,
    unpack,
    unpack_levels,
)

SILU, GELU_TANH, GELU_ERF = 0, 1, 2
MIN_PEAK = np.float32(1e-30)  # a group of activations whose largest magnitude is smaller has levels of 0
_Dims = tuple[str | int, ...]
WEIGHT_DIMS: dict[str, _Dims] = {
    "F32": ("panels", "k", COLUMNS),
    "Bf16": ("panels", "pairs", COLUMNS, 2),
    **{form: ("panels", "steps", 4 if is_int4(form) else 8, COLUMNS, 4) for form in FORMS if is_integer(form)},
}


def constant_specs(form: str, *leading: str) -> tuple[TensorSpec, ...]:
    """Returns the inputs of packed weights; scales and minimums may be float32 too. `leading`: dims before theirs."""
    named = ("scales", *(("minimums",) if has_minimums(form) else ())) if is_integer(form) else ()
    dims: _Dims = (*leading, "panels", "groups", COLUMNS)
    weights = TensorSpec("weights", (*leading, *WEIGHT_DIMS[form]), DTYPES[form])
    return (weights, *(TensorSpec(name, dims, "float16") for name in named))


def grid_attributes(form: str) -> dict[str, int | float]:
    """Returns the attributes `group` and `unit` of an op in an integer form, see `Packed`; nothing for the others."""
    return {"group": GROUP, "unit": GROUP} if is_integer(form) else {}


def quantize_rows(x: Floats, unit: int = GROUP) -> tuple[Any, Any]:
    """Quantises rows [rows, K] float32 in units of 16 or 32 neighbours, ties to even, K padded to a multiple of 32.

    Returns:
        Levels [rows, units, unit] int8 in -127 to 127 and scales [rows, units] float32: largest magnitude / 127.
    """
    units = np.pad(x, ((0, 0), (0, -x.shape[1] % GROUP))).reshape(len(x), -1, unit)
    peak = np.abs(units).max(axis=2)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=~(peak < MIN_PEAK))
    levels = np.rint(units * inverse[..., None])
    return levels.astype(np.int8), (peak / np.float32(127)).astype(np.float32)


def product_of(x: Any, packed: Packed, form: str, columns: Any) -> Any:
    """x [rows, K] times those columns of the packed weights, each output a sum over K in rising order."""
    if not is_integer(form):
        weight = unpack(packed, form)[: x.shape[1], columns]
        return (x.astype(np.float64) @ weight.astype(np.float64)).astype(np.float32)
    assert packed.scales is not None
    unit = packed.unit
    levels, scales = quantize_rows(x, unit)
    weight = unpack_levels(packed.weights, form)[:, columns].reshape(-1, unit, len(columns))
    steps, minimums = (
        None if values is None else spread(values, packed.group, unit, len(weight))[:, columns]
        for values in (packed.scales, packed.minimums)
    )
    assert steps is not None
    sums = levels.sum(axis=2, dtype=np.int32).astype(np.float32) * scales
    total = np.zeros((len(x), len(columns)), np.float32)

    def add(product: Any) -> Any:  # rounded once, as a fused multiply-add
        return (total + product).astype(np.float32)

    for at in range(len(weight)):
        whole = levels[:, at].astype(np.int32) @ weight[at].astype(np.int32)
        step = (scales[:, at, None] * steps[at]).astype(np.float32)
        total = add(whole * step.astype(np.float64))
        if minimums is not None:
            total = add(sums[:, at, None] * minimums[at].astype(np.float64))
    return total


def activated(x: Any, kind: int) -> Any:
    """Returns an activation function of x in float64; `kind` as the attribute `activation`."""
    wide = x.astype(np.float64)
    if kind == SILU:
        return wide / (1 + np.exp(-wide))
    if kind == GELU_TANH:
        return 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    from math import erf

    return 0.5 * wide * (1 + np.vectorize(erf)(wide / np.sqrt(2)))


def normalized(rows: Any, gamma: Any, epsilon: float) -> Any:
    mean = np.mean(np.square(rows.astype(np.float64)), axis=-1, keepdims=True)
    return (rows / np.sqrt(mean + epsilon) * gamma).astype(np.float32)


def columns_of(num_out: int, has_gate: bool) -> Any:
    """Returns where output columns stand in the panels: as they are, or gate and up in turns of 16."""
    if not has_gate:
        return np.arange(num_out)
    width, half = COLUMNS // 2, np.arange(num_out // 2)
    gate = half // width * COLUMNS + half % width
    return np.concatenate([gate, gate + width])


def _twin(form: str, has_norm: bool, has_gate: bool) -> Callable[..., tuple[Any, ...]]:
    """Returns the numpy twin; inputs and attributes are those of the op."""

    def twin(
        x: Any,
        *rest: Any,
        num_in: int,
        num_out: int,
        epsilon: float = 0.0,
        activation: int = SILU,
        group: int = GROUP,
        unit: int = GROUP,
    ) -> tuple[Any, ...]:
        *constants, bias = rest[2:] if has_norm else rest
        source, results = x, []
        if has_norm:
            residual, gamma = rest[:2]
            results.append(x + residual)
            source = normalized(results[0], gamma, epsilon)
        weights, scales, minimums = (*constants, None, None)[:3]
        packed = Packed(weights, scales, minimums, group, unit)
        rows = np.ascontiguousarray(source.reshape(-1, num_in))
        flat = product_of(rows, packed, form, columns_of(num_out, has_gate)) + bias
        if has_gate:
            flat = (activated(flat[:, : num_out // 2], activation) * flat[:, num_out // 2 :]).astype(np.float32)
        return (flat.reshape(*x.shape[:-1], -1), *results)

    return twin


_NO_NORM = "source = Identity(x)"

# By form: `by_column` [panels, 32, K or bytes] of the weights.
_BY_COLUMN = {
    "F32": "by_column = Transpose(weights, perm=[0, 2, 1])",
    "Bf16": "by_column = Reshape(Transpose(float32(weights), perm=[0, 2, 1, 3]), [0, 0, -1])",
    "Int8": "by_column = Reshape(Transpose(weights, perm=[0, 3, 1, 2, 4]), [0, 0, -1])",
    "Int4": f"""{nibbles("weights", 3)}
    by_column = Reshape(Transpose(halves, perm=[0, 4, 1, 2, 3, 5]), [0, 0, -1])
    """,
}


def _columns(source: str, name: str, has_gate: bool) -> str:
    """Returns the statements for `name` [num_out, R] from `source` [panels, 32, R], padding dropped."""
    if not has_gate:
        return f"{name} = Slice(Flatten({source}, axis=2), [0], columns, [0])"
    return f"""
    {name}_sides = Transpose(Reshape({source}, [0, 2, {COLUMNS // 2}, -1]), perm=[1, 0, 2, 3])
    {name}_gates, {name}_ups = Split({name}_sides, axis=0, num_outputs=2)
    {name}_up = Slice(Flatten({name}_ups, axis=3), [0], half_columns, [0])
    {name} = Concat(Slice(Flatten({name}_gates, axis=3), [0], half_columns, [0]), {name}_up, axis=0)
    """


_FLOAT_PRODUCT = """
    product = source @ Transpose(Slice(kept, [0], Unsqueeze(attr.num_in, [0]), [1]), perm=[1, 0])
"""


def _integer_product(form: str, has_gate: bool) -> str:
    scales, minimums = (
        f"{name}_by_column = Transpose({name}, perm=[0, 2, 1])\n"
        + _columns(f"{name}_by_column", f"half_{name}", has_gate)
        for name in ("scales", "minimums")
    )
    return block_product(form, scales, minimums)


def _body(form: str, has_norm: bool, has_gate: bool) -> str:
    sizes = "columns = Unsqueeze(attr.num_out, [0])"
    if has_gate:
        sizes += "\nhalf_columns = columns / 2"
    product = _integer_product(form, has_gate) if is_integer(form) else _FLOAT_PRODUCT
    end = f"biased = product + bias{GATE}" if has_gate else "y = product + bias"
    unpacked = _BY_COLUMN[form.removesuffix("Min")]
    parts = (NORM if has_norm else _NO_NORM, sizes, unpacked, _columns("by_column", "kept", has_gate))
    return "\n    ".join((*parts, product, end))


def _make_op(form: str, has_norm: bool, has_gate: bool) -> Op:
    x = TensorSpec("x", ("batch", "nodes", "num_in"), "float32")
    before = (TensorSpec("residual", x.dims, "float32"), TensorSpec("gamma", ("num_in",), "float32"))
    attributes: dict[str, int | float] = {"num_in": 0, "num_out": 0, **grid_attributes(form)}
    attributes |= ({"epsilon": 1e-6} if has_norm else {}) | ({"activation": SILU} if has_gate else {})
    y = TensorSpec("y", ("batch", "nodes", "num_out"), "float32")
    return Op(
        op_name(form, has_norm, has_gate),
        (x, *(before if has_norm else ()), *constant_specs(form), TensorSpec("bias", ("num_out",), "float32")),
        (y, *((TensorSpec("sum", x.dims, "float32"),) if has_norm else ())),
        _twin(form, has_norm, has_gate),
        _body(form, has_norm, has_gate),
        attributes=attributes,
        domains=("com.microsoft",) if is_integer(form) else (),
    )


def op_name(form: str, has_norm: bool = False, has_gate: bool = False) -> str:
    return f"{'Norm' if has_norm else ''}{'Gated' if has_gate else ''}PackedLinear{form}"


PACKED_LINEARS: tuple[Op, ...] = tuple(
    _make_op(form, has_norm, has_gate) for form in FORMS for has_norm in (False, True) for has_gate in (False, True)
)
