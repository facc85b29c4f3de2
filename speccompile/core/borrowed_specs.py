# SPDX-License-Identifier: Apache-2.0
"""Graphs that work on caches of another engine: some only read them, some write them in place."""

from __future__ import annotations

from dataclasses import replace

from speccompile.core.specs import (
    LENT_ROWS,
    TARGET_LENGTHS,
    BorrowedCache,
    GraphSpec,
    ModelDims,
    TensorSpec,
    borrowed_name,
)


def lent_cache(dims: ModelDims, cache: str, lender: str = "target") -> TensorSpec:
    """A cache of a model of these sizes, as the input of a graph that only reads it."""
    return TensorSpec(borrowed_name(lender, cache), ("batch", dims.num_kv_heads, LENT_ROWS, dims.head_dim), "float32")


def reading_spec(spec: GraphSpec, lender: ModelDims, caches: tuple[str, ...]) -> GraphSpec:
    """`spec` of a decoder that reads caches of the target as well, as far as `target_lengths` says.

    Args:
        spec: of the decoder, without a tail.
        lender: sizes of the target.
        caches: names of the target's caches.
    """
    num = len(spec.inputs) - len(spec.caches)
    lent = tuple(lent_cache(lender, cache) for cache in caches)
    return replace(
        spec,
        inputs=(*spec.inputs[:num], TensorSpec(TARGET_LENGTHS, ("batch",), "int64"), *lent, *spec.inputs[num:]),
        borrowed=tuple(BorrowedCache(t.name, cache) for t, cache in zip(lent, caches, strict=True)),
    )


def sharing_spec(spec: GraphSpec) -> GraphSpec:
    """`spec` of a decoder whose caches are the target's of the same names, written in place."""
    return replace(spec, borrowed=tuple(BorrowedCache(name, name) for name in spec.caches))
