# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs as TensorRT's graphs have them, from those of the neutral graph."""

from __future__ import annotations

import math
from dataclasses import replace

from speccompile.core.specs import (
    CONV_ROWS,
    HIDDEN,
    IMAGE_ROWS,
    KV_ROWS,
    PENDING,
    SHARED_ROWS,
    GraphSpec,
    TensorSpec,
    compacted_cache_name,
    updated_cache_name,
)
from speccompile.graph_kinds.decoder import IMAGE_EMBEDDING, PIXELS

ADDRESS_BYTES = 256  # alignment of every address that TensorRT takes
_FLOATS = ADDRESS_BYTES // 4


def aligned_pending(spec: GraphSpec) -> int:
    """Returns `spec.max_pending`, or the next larger number, if any, that aligns every slot of every state."""
    for max_pending in range(spec.max_pending, spec.max_pending + _FLOATS):
        if not misaligned_states(replace(spec, max_pending=max_pending)):
            return max_pending
    return spec.max_pending


def misaligned_states(spec: GraphSpec) -> list[str]:
    """Returns the states of which a slot's bytes are no multiple of `ADDRESS_BYTES`."""
    return [name for name, shape in spec.state_shapes(1).items() if math.prod(shape) % _FLOATS]


def tensorrt_spec(spec: GraphSpec, dtype: str, max_rows: int, *, compacts: bool = False) -> GraphSpec:
    """Returns `spec` as in TensorRT's graph: its dtype, static caches and the number of rows to attend to.

    `kv_rows` comes before the states and caches of a graph that reads prompts; with `compacts` a `<cache>.compacted`
    for each cache comes after the updates. States stay float32; all their dims but the batch are static, and
    `max_pending` is that of `aligned_pending`.

    Args:
        spec: of a whole neutral graph, tail included; of a rollback graph; or of one without caches.
        dtype: of caches and hidden states: float32, float16 or bfloat16. Distributions stay float32.
        max_rows: rows of the caches, those that a step of drafts needs after the last sequence row included.
        compacts: whether KVRollback follows the updates in the graph (where a plugin does it).
    """
    if spec.states:
        spec = replace(spec, max_pending=aligned_pending(spec))
    states = {name for state in spec.states for name in (state, updated_cache_name(state))}
    fixed = {PENDING: spec.max_pending, CONV_ROWS: spec.conv_history + spec.max_pending}

    def convert(tensor: TensorSpec) -> TensorSpec:
        if tensor.name.split(".")[0] == HIDDEN or tensor.name in (IMAGE_EMBEDDING, IMAGE_ROWS, PIXELS):
            return replace(tensor, dtype=dtype)
        if tensor.name in states:
            return replace(tensor, dims=tuple(fixed.get(str(d), d) for d in tensor.dims))
        if tensor.name not in caches:
            return tensor
        dims = tuple(max_rows if d in ("max_seq", SHARED_ROWS) else d for d in tensor.dims)
        return replace(tensor, dims=dims, dtype=dtype)

    caches = {name for cache in spec.cache_inputs for name in (cache, updated_cache_name(cache))}
    inputs = [convert(t) for t in spec.inputs]
    # A distribution is never a dummy in TensorRT: its function has no branches, and all that branches is the size of an
    # input.
    dists = {"draft_vocab": spec.dist_width}
    outputs = [replace(convert(t), dims=tuple(dists.get(str(d), d) for d in convert(t).dims)) for t in spec.outputs]
    if spec.caches and spec.reads_prompts:
        inputs.insert(len(inputs) - len(spec.caches) - len(spec.states), TensorSpec(KV_ROWS, ("kv",), "int8"))
    if compacts:
        held = {t.name: t for t in inputs}
        outputs += [replace(held[c], name=compacted_cache_name(c)) for c in spec.caches]
    return replace(spec, inputs=tuple(inputs), outputs=tuple(outputs))
