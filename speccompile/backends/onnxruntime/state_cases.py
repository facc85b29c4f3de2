# SPDX-License-Identifier: Apache-2.0
"""Calls of the kernels of recurrent states for the self-test, and tests that all steps and paths give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.specs import LENGTHS, STATE_LENGTHS, SURE_NODES, TREE_MASK
from speccompile.core.tree import TokenTree, chain_mask
from speccompile.ops.conv_rows import CONV_ROWS
from speccompile.ops.gated_delta import GATED_DELTA, pending_width
from speccompile.ops.op import Op

Arrays = dict[str, NDArray[Any]]
Run = Callable[[Arrays], list[NDArray[Any]]]  # of one session: inputs by name -> outputs
NODE_INPUTS = ("q", "k", "v", "g", "beta", "x")  # have one row for each node, [batch, nodes, ...]
STATE_INPUTS = ("state", "pending", "rows")  # in the order of the outputs that update them
_BATCH, _NODES, _PENDING = 3, 5, 4
# Parents by slot: all nodes are sure; no node is, with branches at several depths; a branch beside the sure nodes.
_TREES = ((-1, 0, 1, 2, 3), (-1, 0, 0, 2, 1), (-1, 0, 1, 0, 3))
_HEADS = {"num_key_heads": 2, "num_value_heads": 4}
_KEY_DIM, _VALUE_DIM, _CHANNELS, _KERNEL = 19, 37, 70, 4  # parts of vectors everywhere


def state_cases() -> Iterator[tuple[Op, Arrays, dict[str, int | float]]]:
    """Yields (op, inputs, attributes): both ops in both forms; a new sequence beside slots with pending rows."""
    rng = np.random.default_rng(0)
    key_heads, value_heads = _HEADS.values()
    width = pending_width(key_heads, value_heads, _KEY_DIM, _VALUE_DIM)
    shapes = {
        **dict.fromkeys("qk", (_BATCH, _NODES, key_heads * _KEY_DIM)),
        "v": (_BATCH, _NODES, value_heads * _VALUE_DIM),
        **dict.fromkeys(("g", "beta"), (_BATCH, _NODES, value_heads)),
        "state": (_BATCH, value_heads, _KEY_DIM, _VALUE_DIM),
        "pending": (_BATCH, _PENDING, width),
        "x": (_BATCH, _NODES, _CHANNELS),
        "weight": (_CHANNELS, _KERNEL),
        "bias": (_CHANNELS,),
        "rows": (_BATCH, _KERNEL - 1 + _PENDING, _CHANNELS),
    }
    given: Arrays = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    for gates in (given["g"], given["pending"][..., -2 * value_heads : -value_heads]):
        np.negative(np.abs(gates), out=gates)
    for keys in (given["k"], given["pending"][..., : key_heads * _KEY_DIM]):
        keys *= np.float32(_KEY_DIM**-0.5)
    given[LENGTHS], given[STATE_LENGTHS] = np.array([0, 9, 30]), np.array([0, 5, 29])
    given[SURE_NODES], given[TREE_MASK] = np.array([_NODES, 0, 2]), chain_mask(_BATCH, _NODES)
    recurrence: dict[str, int | float] = {**_HEADS, "scale": 0.3}
    forms: tuple[tuple[Op, dict[str, int | float]], ...] = (
        (GATED_DELTA, {**recurrence, "delta": 1}),
        (GATED_DELTA, {**recurrence, "delta": 0}),
        (CONV_ROWS, {"activation": 0}),
        (CONV_ROWS, {"activation": 1}),
    )
    for op, attributes in forms:
        yield op, {t.name: given[t.name] for t in op.inputs}, attributes


def with_trees(inputs: Arrays) -> Arrays:
    parents = np.array(_TREES)
    return {**inputs, TREE_MASK: TokenTree(parents, parents, np.full(_BATCH, _NODES)).mask()}


def paths_fault(op: Op, run: Run, inputs: Arrays) -> str | None:
    """Returns which path of the trees gives other bits than a chain of its nodes; None where all give the same."""
    whole, *_ = run(with_trees(inputs))
    for slot, parents in enumerate(_TREES):
        for leaf in set(range(_NODES)).difference(parents):
            path = [leaf]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            alone = {n: a if a.shape[0] != _BATCH else a[slot : slot + 1] for n, a in inputs.items()}
            alone |= {n: a[:, path] for n, a in alone.items() if n in NODE_INPUTS}
            chain = {TREE_MASK: chain_mask(1, len(path)), SURE_NODES: np.zeros(1, np.int64)}
            if not np.array_equal(run({**alone, **chain})[0][0], whole[slot, path]):
                return f"{op.name}: the path {path} of slot {slot} differs from a chain"
    return None


def _settled(op: Op, state: NDArray[Any]) -> NDArray[Any]:
    return state[:, : _KERNEL - 1] if op is CONV_ROWS else state


def steps_fault(op: Op, run: Run, inputs: Arrays) -> str | None:
    """Returns which step gives other bits than a run of all nodes; None where all give the same.

    The nodes are run at once, one by one, and as drafts that are all accepted and applied by the next step.
    """
    names = [name for name in STATE_INPUTS if name in inputs]
    batch, num_nodes = inputs[LENGTHS].shape[0], next(inputs[n] for n in NODE_INPUTS if n in inputs).shape[1]
    whole, state, *_ = run({**inputs, SURE_NODES: np.full(batch, num_nodes)})
    single, one = dict(inputs), np.ones(batch, np.int64)
    for node in range(num_nodes):
        rows = {n: inputs[n][:, node : node + 1] for n in NODE_INPUTS if n in inputs}
        out, *updated = run({**single, **rows, SURE_NODES: one, TREE_MASK: chain_mask(batch, 1)})
        if not np.array_equal(out[:, 0], whole[:, node]):
            return f"{op.name}: node {node} differs from a single step"
        done = inputs[LENGTHS] + node + 1
        single |= {**dict(zip(names, updated, strict=True)), LENGTHS: done, STATE_LENGTHS: done}
    if not np.array_equal(_settled(op, single[names[0]]), _settled(op, state)):
        return f"{op.name}: single steps leave another state"
    return _drafts_fault(op, run, inputs, whole, _settled(op, state))


def _drafts_fault(op: Op, run: Run, inputs: Arrays, whole: NDArray[Any], state: NDArray[Any]) -> str | None:
    names = [name for name in STATE_INPUTS if name in inputs]
    count, none = _PENDING, np.zeros(len(inputs[LENGTHS]), np.int64)

    def part(begin: int, end: int) -> Arrays:
        rows = {n: a[:, begin:end] for n, a in inputs.items() if n in NODE_INPUTS}
        return {**inputs, **rows, TREE_MASK: chain_mask(len(none), end - begin)}

    out, *updated = run({**part(0, count), SURE_NODES: none})
    if not np.array_equal(out, whole[:, :count]):
        return f"{op.name}: drafts have another output"
    done = {**dict(zip(names, updated, strict=True)), LENGTHS: inputs[LENGTHS] + count, STATE_LENGTHS: inputs[LENGTHS]}
    last, replayed, *_ = run({**part(count, _NODES), **done, SURE_NODES: none + _NODES - count})
    if not np.array_equal(last, whole[:, count:]) or not np.array_equal(_settled(op, replayed), state):
        return f"{op.name}: accepted drafts differ from nodes that were applied at once"
    return None
