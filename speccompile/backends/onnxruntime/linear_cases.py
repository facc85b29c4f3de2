# SPDX-License-Identifier: Apache-2.0
"""Calls of kernels for the self-test: packed linears of every form, experts, verification and drafts' tails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.ops.candidates import NODE_PROBS_OP, TOP_TOKENS
from speccompile.ops.expert_linear import EXPERT_LINEARS
from speccompile.ops.finite_token import FINITE_TOKEN
from speccompile.ops.grid import Grid
from speccompile.ops.kv_rollback import KV_ROLLBACK
from speccompile.ops.low_rank import ADD_NORM, GATED_LOW_RANK, LOW_RANK
from speccompile.ops.op import Op
from speccompile.ops.packed_linear import PACKED_LINEARS
from speccompile.ops.packed_rows import PACKED_ROWS
from speccompile.ops.packing import GROUP, Packed, gate_columns, has_minimums, is_int4, is_integer, pack, pack_grid
from speccompile.ops.sample_token import SAMPLE_TOKEN
from speccompile.ops.spec_verify import SPEC_VERIFY

NUM_ROWS = 7  # more than one tile of rows in most instruction sets


def random_grid(form: str, num_in: int, num_out: int, seed: int, *, group: int, dtype: str) -> Grid:
    """Returns weights near a normal distribution's of 0.05 on a grid of an integer form.

    Args:
        group: inputs with one scale; 0: all.
        dtype: of scales and minimums, float16 or float32.
    """
    rng = np.random.default_rng(seed)
    bits = 4 if is_int4(form) else 8
    middle, group = 1 << (bits - 1), group or num_in
    dims = num_out, -(-num_in // group)
    scales = (rng.choice([-1, 1], dims) * rng.uniform(0.05, 0.15, dims) / middle).astype(dtype)
    minimums = (-middle * scales * rng.uniform(0.9, 1.1, dims)).astype(dtype) if has_minimums(form) else None
    levels = np.clip(rng.normal(middle, middle / 3, (num_out, num_in)), 0, 2 * middle - 1).astype(np.uint8)
    return Grid(levels, scales, group, bits, 0 if has_minimums(form) else middle, minimums)


def random_packed(
    form: str,
    num_in: int,
    num_out: int,
    seed: int,
    *,
    has_gate: bool = False,
    group: int = GROUP,
    unit: int = GROUP,
    dtype: str = "float16",
) -> Packed:
    """Returns random packed weights; `group`, `unit` and `dtype` say what grid an integer form has."""
    if not is_integer(form):
        weight = np.random.default_rng(seed).normal(0, 0.05, (num_in, num_out)).astype(np.float32)
        return pack(weight[:, gate_columns(num_out)] * (gate_columns(num_out) >= 0) if has_gate else weight, form)
    grid = random_grid(form, num_in, num_out, seed, group=group, dtype=dtype)
    got, packed = pack_grid(grid.take(gate_columns(num_out)) if has_gate else grid, unit=unit)
    assert got == form
    return packed


def form_of(op: Op) -> str:
    return op.name.replace("Linear", "Rows").rsplit("Rows", 1)[1]


# Every integer form is tried with these grids too.
OTHER_GRIDS: tuple[dict[str, Any], ...] = (
    {"group": 16, "dtype": "float32"},
    {"group": 96, "unit": 16},
    {"group": 0, "dtype": "float32"},
)


_Call = tuple[Op, dict[str, Any], dict[str, int | float]]


def row_cases(num_in: int = 70, num_out: int = 52) -> Iterator[_Call]:
    """Yields calls of every op that gathers rows of an embedding."""
    tokens = np.random.default_rng(0).integers(-num_out, num_out, (1, NUM_ROWS))
    for op in PACKED_ROWS:
        for grid in ({}, *(OTHER_GRIDS if is_integer(form_of(op)) else ())):
            packed = random_packed(form_of(op), num_in, num_out, 0, **grid)
            sizes = {"num_in": num_in, "num_out": num_out, "group": packed.group}
            attributes: dict[str, int | float] = {name: sizes[name] for name in op.attributes}
            yield op, {"tokens": tokens, **packed.constants}, attributes


def linear_cases(num_in: int = 70, num_out: int = 52) -> Iterator[_Call]:
    """Yields calls of every packed linear; the sizes need padding in every direction."""
    rng = np.random.default_rng(0)
    for op in PACKED_LINEARS:
        has_gate, form = "activation" in op.attributes, form_of(op)
        is_plain = is_integer(form) and op.name == f"PackedLinear{form}"
        for grid in ({}, *(OTHER_GRIDS if is_plain else ())):
            packed = random_packed(form, num_in, num_out, 0, has_gate=has_gate, **grid)
            given = {
                "x": rng.standard_normal((1, NUM_ROWS, num_in)).astype(np.float32),
                "residual": rng.standard_normal((1, NUM_ROWS, num_in)).astype(np.float32),
                "gamma": rng.standard_normal(num_in).astype(np.float32),
                **packed.constants,
                "bias": rng.standard_normal(num_out).astype(np.float32),
            }
            attributes = {**op.attributes, "num_in": num_in, "num_out": num_out, **packed.attributes}
            yield op, {t.name: given[t.name] for t in op.inputs}, attributes


def low_rank_cases(num_in: int = 70, num_out: int = 52, rank: int = 5) -> Iterator[_Call]:
    """Yields calls of three slots, one without an adapter; of each rank some columns are zeros. And of AddNorm."""
    rng = np.random.default_rng(0)
    shapes = {"base": (3, NUM_ROWS, num_out), "x": (3, NUM_ROWS, num_in)}
    factors = {"a": (3, rank, num_in), "b": (3, rank, num_out)}
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in {**shapes, **factors}.items()}
    half = num_out // 2
    given["a"][0] = given["b"][0] = given["b"][1, 1:] = given["b"][2, :2, :half] = given["b"][2, 2:, half:] = 0
    inputs = {t.name: given.get(t.name, np.array([2, 0, 1])) for t in LOW_RANK.inputs}
    yield LOW_RANK, inputs, {}
    if num_out % 2 == 0:
        for activation in range(3):
            yield GATED_LOW_RANK, inputs, {"activation": activation}
    gamma = rng.standard_normal(num_in).astype(np.float32)
    yield ADD_NORM, {"x": given["x"], "residual": given["x"][::-1].copy(), "gamma": gamma}, {"epsilon": 1e-5}


Arrays = dict[str, NDArray[Any]]
Attributes = dict[str, int | float]
Run = Callable[[Arrays], list[NDArray[Any]]]  # of one session: inputs by name -> outputs
PER_ROW = 3


def expert_constants(
    op: Op, num_in: int, num_out: int, num_experts: int, seed: int = 0, **grid: Any
) -> tuple[Arrays, Attributes]:
    """Returns random weights and bias of an expert op by name, and its attributes; `grid` as in `random_packed`."""
    has_gate, seeds = "activation" in op.attributes, range(seed, seed + num_experts)
    parts = [random_packed(form_of(op), num_in, num_out, own, has_gate=has_gate, **grid) for own in seeds]
    constants = {name: np.stack([part.constants[name] for part in parts]) for name in parts[0].constants}
    bias = np.random.default_rng(seed).standard_normal((num_experts, num_out)).astype(np.float32)
    sizes = {"num_in": num_in, "num_out": num_out, "num_experts": num_experts}
    return {**constants, "bias": bias}, {**op.attributes, **sizes, **parts[0].attributes}


def expert_rows(num_rows: int, num_in: int, num_experts: int, per_row: int, seed: int = 1) -> Arrays:
    """Returns random rows, some numbers much larger than the others, and different experts for each."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((num_rows, num_experts)), axis=1)[:, :per_row]
    return {"x": (rng.standard_normal((num_rows, num_in)) ** 3).astype(np.float32), "ids": ids.astype(np.int64)}


def expert_cases(num_in: int = 70, num_out: int = 52, num_experts: int = 5) -> Iterator[tuple[Op, Arrays, Attributes]]:
    """Yields a call of every expert op; the sizes need padding in every direction."""
    for op in EXPERT_LINEARS:
        for grid in ({}, *(OTHER_GRIDS if op.name.startswith("ExpertLinearInt") else ())):
            constants, attributes = expert_constants(op, num_in, num_out, num_experts, **grid)
            given = {**expert_rows(NUM_ROWS, num_in, num_experts, PER_ROW), **constants}
            yield op, {t.name: given[t.name] for t in op.inputs}, attributes


def expert_row_fault(op: Op, run: Run, inputs: Mapping[str, NDArray[Any]]) -> str | None:
    """Returns which row has other bits alone, or with one expert alone; None where none has."""
    (whole,), (num_rows, per_row) = run(dict(inputs)), inputs["ids"].shape
    rows = whole.reshape(num_rows, per_row, -1)
    for row in range(num_rows):
        own: Arrays = {**inputs, "x": inputs["x"][row : row + 1], "ids": inputs["ids"][row : row + 1]}
        single: Arrays = {**own, "ids": np.ascontiguousarray(own["ids"][:, -1:])}
        if not (np.array_equal(rows[row], run(own)[0]) and np.array_equal(rows[row, -1:], run(single)[0])):
            return f"{op.name}: row {row} depends on the other rows"
    return None


_PARENTS = (-1, 0, 0, 1, 2, 4)
_VOCAB = 1300  # several chunks of 256, and a part of one


def _values(rng: np.random.Generator) -> Arrays:
    batch, nodes = 5, len(_PARENTS)
    logits = (rng.standard_normal((batch, nodes, _VOCAB)) * 2).astype(np.float32)
    return {
        "logits": logits,
        "tokens": np.tile(logits.argmax(axis=-1)[:, :1], (1, nodes)),
        "parents": np.tile(_PARENTS, (batch, 1)),
        "uniforms": rng.random((batch, nodes, 2)).astype(np.float32),
        "temperature": np.array([0, 1, 0.7, 1.3, 0.9], np.float32),
        "top_k": np.array([0, 0, 30, 0, 400]),
        "top_p": np.array([1, 1, 1, 0.8, 0.5], np.float32),
        "next_token": np.arange(batch),
        "cache": rng.standard_normal((batch, 2, 20, 6)).astype(np.float32),
        "lengths": np.array([0, 3, 5, 9, 14]),
        "path": np.tile([0, 2, 4, 5, -1, -1], (batch, 1)),
    }


def tail_cases() -> Iterator[tuple[Op, Arrays, dict[str, int | float]]]:
    """Yields calls of every kernel: op, inputs by name, attributes; draws are too far apart for rounding to matter."""
    rng = np.random.default_rng(3)
    given = _values(rng)
    logits, num_tokens = given["logits"], given["logits"].shape[-1]
    spoilt = logits.copy()
    spoilt[1, 2, 7], spoilt[2, 0, -1], spoilt[3, 1, 5] = np.nan, np.inf, -np.inf
    drafts = rng.dirichlet(np.ones(num_tokens), logits.shape[:2]).astype(np.float32)
    one = {"logits": logits[:, :1], "uniforms": given["uniforms"][:, 0, 0]}
    greedy = {"temperature": np.zeros_like(given["temperature"])}
    changes: list[tuple[Op, Arrays]] = [
        (SPEC_VERIFY, {"draft_probs": np.zeros((*logits.shape[:2], 1), np.float32)}),
        (SPEC_VERIFY, {"draft_probs": drafts}),
        (FINITE_TOKEN, {"logits": spoilt}),
        (SAMPLE_TOKEN, one),
        (SAMPLE_TOKEN, one | greedy),
        (TOP_TOKENS, {"logits": np.round(logits)}),  # ties
        (NODE_PROBS_OP, {}),
        (NODE_PROBS_OP, greedy),
        (KV_ROLLBACK, {}),
    ]
    for op, changed in changes:
        values = given | changed
        yield op, {t.name: np.ascontiguousarray(values[t.name]) for t in op.inputs}, dict(op.attributes)


def integers_differ(mine: NDArray[Any], theirs: NDArray[Any]) -> bool:
    return mine.dtype == np.int64 and not np.array_equal(mine, theirs)
