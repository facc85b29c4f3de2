# SPDX-License-Identifier: Apache-2.0
"""Graphs that work on caches of another engine: some only read them, some write them in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from speccompile.core.dims import ModelDims
from speccompile.core.specs import SHARED_ROWS, TARGET_LENGTHS, BorrowedCache, GraphSpec, TensorSpec, cache_names
from speccompile.errors import BundleError
from speccompile.graph_kinds.decoder import decoder_spec


def borrowed_name(owner: str, cache: str) -> str:
    """Returns the name of the input that is the cache `cache` of the graph `owner`, where it is only read."""
    return f"{owner}.{cache}"


def shared_cache(dims: ModelDims, cache: str, owner: str = "target") -> TensorSpec:
    """Returns a cache of a model of these sizes as the input of a graph that only reads it."""
    _, heads, _, head_dim = decoder_spec(owner, dims).input(cache).dims
    return TensorSpec(borrowed_name(owner, cache), ("batch", heads, SHARED_ROWS, head_dim), "float32")


def reading_spec(spec: GraphSpec, owner: ModelDims, caches: tuple[str, ...]) -> GraphSpec:
    """Returns `spec` of a decoder that also reads caches of the target, the first `target_lengths` rows of each."""
    num = len(spec.inputs) - len(spec.caches)
    shared = tuple(shared_cache(owner, cache) for cache in caches)
    return replace(
        spec,
        inputs=(*spec.inputs[:num], TensorSpec(TARGET_LENGTHS, ("batch",), "int64"), *shared, *spec.inputs[num:]),
        borrowed=tuple(BorrowedCache(t.name, cache) for t, cache in zip(shared, caches, strict=True)),
    )


def sharing_spec(spec: GraphSpec, layers: Sequence[int], owner: str = "target") -> GraphSpec:
    """Returns `spec` of a decoder of the owner's `layers`, from 0, whose caches it writes; it copies states."""
    named = [zip(cache_names(own), cache_names(theirs), strict=True) for own, theirs in enumerate(layers)]
    held = {own: theirs for pairs in named for own, theirs in pairs}
    borrowed = tuple(BorrowedCache(name, held[name], owner) for name in spec.caches)
    return replace(spec, borrowed=borrowed, state_owner=owner if spec.states else "")


def find_owner(
    spec: GraphSpec, cache_ref: BorrowedCache, sizes: Mapping[str, tuple[Any, ...]], num_slots: int, max_slots: int
) -> int:
    """Returns the index of the owner's cache that a cache reference names.

    Args:
        sizes: kv heads, head size and, where they differ, dtype of the owner's own caches by name, in order.

    Raises:
        BundleError: there is no such cache, it has another shape, or there are fewer slots.
    """
    where, todo = f"engine {spec.name} ({cache_ref.name})", "Build the bundle again."
    tensor = spec.input(cache_ref.name)
    if cache_ref.cache not in sizes:
        got = f"no cache {cache_ref.cache!r} of {cache_ref.owner}"
        raise BundleError(where, got, f"one of {', '.join(sizes) or 'none'}", todo)
    held = sizes[cache_ref.cache]
    wanted = (tensor.dims[1], tensor.dims[3], tensor.dtype)[: len(held)]
    if held != wanted:
        got, expected = (f"{size[0]} heads of {' '.join(map(str, size[1:]))}" for size in (held, wanted))
        raise BundleError(where, f"{got} to borrow", expected, todo)
    if num_slots < max_slots:
        raise BundleError(where, f"{num_slots} slots to borrow", f"at least {max_slots}", todo)
    return list(sizes).index(cache_ref.cache)
