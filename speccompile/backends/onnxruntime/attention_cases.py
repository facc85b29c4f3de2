# SPDX-License-Identifier: Apache-2.0
"""Calls of the attention kernels for the self-test, and the test that a chain gives the bits of single steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.specs import LENGTHS, TREE_MASK
from speccompile.ops.cached_attention import CACHED_ATTENTION, LATENT_ATTENTION, SHARED_ATTENTION, SINK_ATTENTION
from speccompile.ops.cross_attention import ROTARY_CROSS_ATTENTION
from speccompile.ops.int8_caches import INT8_ATTENTION, quantize_rows
from speccompile.ops.op import Op
from speccompile.ops.qkv_attention import QKV_ATTENTION

Arrays = dict[str, NDArray[Any]]
Run = Callable[[Arrays], list[NDArray[Any]]]  # of one session: inputs by name -> outputs
# Of a latent attention those of K alone; scales where they are int8.
CACHES = ("k_cache", "k_scale", "v_cache", "v_scale")
NODE_AXIS = {"q": 2, "k": 2, "v": 2, "qkv": 1}  # of the inputs that have one row for each node


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of a call."""

    batch: int = 2
    nodes: int = 7
    num_kv_heads: int = 2
    group: int = 3
    head_dim: int = 36
    max_seq: int = 40
    rotary_dim: int = 12

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


def attention_inputs(op: Op, sizes: AttentionSizes, rng: np.random.Generator, lengths: NDArray[Any]) -> Arrays:
    """Returns inputs of a step over chains, with `lengths` [batch] rows in use, for an attention op."""
    batch, nodes, dim = sizes.batch, sizes.nodes, sizes.head_dim
    angles = rng.standard_normal((sizes.max_seq, sizes.rotary_dim // 2))
    shapes = {
        "qkv": (batch, nodes, (sizes.num_heads + 2 * sizes.num_kv_heads) * dim),
        "q": (batch, sizes.num_heads, nodes, dim),
        **dict.fromkeys("kv", (batch, sizes.num_kv_heads, nodes, dim)),
        **dict.fromkeys(("k_cache", "v_cache"), (batch, sizes.num_kv_heads, sizes.max_seq, dim)),
        **dict.fromkeys(("q_gamma", "k_gamma"), (dim,)),
        "sinks": (sizes.num_heads,),
    }
    given: Arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    given |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    given[LENGTHS], given["num_rows"] = np.asarray(lengths, np.int64), np.array([sizes.max_seq])
    given[TREE_MASK] = np.tile(np.tri(nodes, dtype=np.bool_), (batch, 1, 1))
    return inputs_of(op, given)


def inputs_of(op: Op, given: Mapping[str, NDArray[Any]]) -> Arrays:
    """Returns the inputs of an op in order; int8 caches are those of `given`, quantised."""
    rows = {n: quantize_rows(given[f"{n}_cache"]) for n in "kv" if f"{n}_scale" in {t.name for t in op.inputs}}
    levels = {f"{n}_cache": pair[0] for n, pair in rows.items()} | {f"{n}_scale": pair[1] for n, pair in rows.items()}
    return {tensor.name: {**given, **levels}[tensor.name] for tensor in op.inputs}


def attention_attributes(op: Op, sizes: AttentionSizes, **others: float) -> dict[str, int | float]:
    """Returns all attributes of a call; `others` replace the defaults."""
    known = {"num_heads", "num_kv_heads", "head_dim", "rotary_dim"} & set(op.attributes)
    made = {"scale": sizes.head_dim**-0.5, **{name: getattr(sizes, name) for name in known}, **others}
    return {**op.attributes, **made}


def attention_cases() -> Iterator[tuple[Op, Arrays, dict[str, int | float]]]:
    """Yields (op, inputs, attributes): every attention op, plainly and with a window and a softcap."""
    rng, sizes = np.random.default_rng(0), AttentionSizes()
    floats = (CACHED_ATTENTION, SINK_ATTENTION, LATENT_ATTENTION, SHARED_ATTENTION, *QKV_ATTENTION.values())
    for op in (*floats, *(INT8_ATTENTION[op.name] for op in floats)):
        for others in ({}, {"window": 5, "softcap": 2.0} if "softcap" in op.attributes else {"window": 5}):
            inputs = attention_inputs(op, sizes, rng, np.array([0, sizes.max_seq - sizes.nodes]))
            yield op, inputs, attention_attributes(op, sizes, **others)


def cross_inputs(sizes: AttentionSizes, rng: np.random.Generator) -> Arrays:
    """Returns inputs of a RotaryCrossAttention; the first node of a slot sees one row, the last one all."""
    batch, nodes, rows, dim = sizes.batch, sizes.nodes, sizes.max_seq, sizes.head_dim
    angles = rng.standard_normal((rows, sizes.rotary_dim // 2))
    limits = rng.integers(1, rows + 1, (batch, nodes))
    limits[:, 0], limits[:, -1] = 1, rows
    cache = (batch, sizes.num_kv_heads, rows, dim)
    return {
        "q": rng.standard_normal((batch, nodes, sizes.num_heads * dim)).astype(np.float32),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "k_cache": rng.standard_normal(cache).astype(np.float32),
        "v_cache": rng.standard_normal(cache).astype(np.float32),
        "positions": rng.integers(0, rows, (batch, nodes)),
        "limits": limits,
    }


def cross_attributes(sizes: AttentionSizes, interleaved: int = 0) -> dict[str, int | float]:
    known = {name: getattr(sizes, name) for name in ("num_heads", "head_dim", "rotary_dim")}
    return {**ROTARY_CROSS_ATTENTION.attributes, **known, "scale": sizes.head_dim**-0.5, "interleaved": interleaved}


def cross_cases() -> Iterator[tuple[Op, Arrays, dict[str, int | float]]]:
    rng, sizes = np.random.default_rng(0), AttentionSizes()
    for op in (ROTARY_CROSS_ATTENTION, INT8_ATTENTION[ROTARY_CROSS_ATTENTION.name]):
        for interleaved in (0, 1):
            yield op, inputs_of(op, cross_inputs(sizes, rng)), cross_attributes(sizes, interleaved)


def single_steps(run: Run, inputs: Arrays) -> Iterator[tuple[int, NDArray[Any]]]:
    """Runs a chain node by node; yields (node, its output [batch, ...])."""
    caches: Mapping[str, NDArray[Any]] = {name: inputs[name] for name in CACHES if name in inputs}
    for node in range(inputs[TREE_MASK].shape[1]):
        step = {n: a.take([node], NODE_AXIS[n]) if n in NODE_AXIS else a for n, a in inputs.items()}
        step |= {**caches, LENGTHS: inputs[LENGTHS] + node, TREE_MASK: np.ones((len(inputs[LENGTHS]), 1, 1), np.bool_)}
        out, *updated = run(step)
        if updated:  # a SharedAttention reads the rows of all nodes, which are there
            caches = dict(zip(caches, updated, strict=True))
        yield node, out[:, 0]


def chain_fault(op: Op, run: Run, inputs: Arrays) -> str | None:
    """Returns which node of a chain differs from a single step of it; None where all have equal bits."""
    whole = run(inputs)[0]
    for node, alone in single_steps(run, inputs):
        if not np.array_equal(whole[:, node], alone):
            return f"{op.name}: node {node} of a chain differs from a single step"
    return None
