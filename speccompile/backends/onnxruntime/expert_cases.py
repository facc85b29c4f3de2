# SPDX-License-Identifier: Apache-2.0
"""Calls of the expert kernels for the self-test, and the test that a row has the same bits whatever shares its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.backends.onnxruntime.linear_cases import OTHER_GRIDS, form_of, random_packed
from speccompile.ops.expert_linear import EXPERT_LINEARS
from speccompile.ops.op import Op

Arrays = dict[str, NDArray[Any]]
Attributes = dict[str, int | float]
Run = Callable[[Arrays], list[NDArray[Any]]]  # of one session: inputs by name -> outputs
NUM_ROWS, PER_ROW = 7, 3


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
