# SPDX-License-Identifier: Apache-2.0
"""Graphs whose target caches are int8 rows: after each cache comes another, with a scale for 32 columns of a row.

So whatever moves rows of caches moves scales like them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from speccompile.core.dims import INT8_CACHE_GROUP
from speccompile.core.specs import Dim, GraphSpec, TensorSpec, updated_cache_name

INT8 = "int8"  # of `engine.kv_cache`


def scale_name(cache: str) -> str:
    """Returns the name of the cache [slots, kv_heads, max_seq, groups] float32 with the scales of `cache`."""
    return f"{cache}.scale"


def scale_dims(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Returns the dims of the scales of rows whose last dim is a number."""
    return (*dims[:-1], -(-int(dims[-1]) // INT8_CACHE_GROUP))


def int8_cache_names(spec: GraphSpec) -> tuple[str, ...]:
    """Returns the caches that `engine.kv_cache` is about: a target's, and those that a draft borrows."""
    return tuple(ref.name for ref in spec.borrowed) or (spec.own_caches if spec.tail == "verify" else ())


def with_int8_caches(spec: GraphSpec, names: Collection[str] | None = None) -> GraphSpec:
    """Returns `spec` with int8 caches and their scales; `names` are by default `int8_cache_names(spec)`."""
    names = int8_cache_names(spec) if names is None else names
    pairs = {name: (name, scale_name(name)) for name in names}
    updated = {updated_cache_name(name): tuple(map(updated_cache_name, pair)) for name, pair in pairs.items()}
    refs = []
    for ref in spec.borrowed:
        refs += (
            [ref, replace(ref, name=scale_name(ref.name), cache=scale_name(ref.cache))] if ref.name in names else [ref]
        )
    return replace(
        spec,
        inputs=_tensors(spec.inputs, pairs),
        outputs=_tensors(spec.outputs, updated),
        caches=tuple(name for cache in spec.caches for name in pairs.get(cache, (cache,))),
        borrowed=tuple(refs),
    )


def _tensors(tensors: Iterable[TensorSpec], pairs: Mapping[str, tuple[str, ...]]) -> tuple[TensorSpec, ...]:
    made: list[TensorSpec] = []
    for tensor in tensors:
        if (pair := pairs.get(tensor.name)) is None:
            made.append(tensor)
        else:
            made += [replace(tensor, dtype=INT8), TensorSpec(pair[1], scale_dims(tensor.dims), "float32")]
    return tuple(made)
