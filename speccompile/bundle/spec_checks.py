# SPDX-License-Identifier: Apache-2.0
"""Refuses a graph's inputs and outputs, as a manifest has them, that contradict each other or the bundle's graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from speccompile.bundle.format import REBUILD
from speccompile.core.specs import GraphSpec, compacted_cache_name, updated_cache_name
from speccompile.errors import BundleError

_DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")


def check_specs(where: str, specs: Mapping[str, GraphSpec]) -> None:
    """Compares each graph's inputs and outputs with the names that it gives, and with the graphs that it borrows from.

    Raises:
        BundleError: the first contradiction.
    """
    for name, spec in specs.items():
        for field, got, expected in (*_faults(name, spec), *_borrowed(spec, specs)):
            raise BundleError(f"{where} (graphs.{name}.spec.{field})", got, expected, REBUILD)


def _faults(name: str, spec: GraphSpec) -> Iterator[tuple[str, str, str]]:
    if spec.name != name:
        yield "name", repr(spec.name), repr(name)
    for side, tensors in (("inputs", spec.inputs), ("outputs", spec.outputs)):
        names = [t.name for t in tensors]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            yield side, f"{twice[0]!r} twice", "every name once"
        for tensor in tensors:
            if tensor.dtype not in _DTYPES:
                yield side, f"{tensor.name!r} of dtype {tensor.dtype!r}", f"one of {', '.join(_DTYPES)}"
    inputs, outputs = {t.name for t in spec.inputs}, {t.name for t in spec.outputs}
    for field, held in (("caches", spec.caches), ("states", spec.states)):
        for cache in held:
            updates = {updated_cache_name(cache), compacted_cache_name(cache)}
            if cache not in inputs or not updates & outputs or held.count(cache) > 1:
                yield field, repr(cache), f"an input with an output {updated_cache_name(cache)!r}, once"
    kept = {*spec.caches, *spec.states}
    if forgotten := [t.name for t in spec.inputs if updated_cache_name(t.name) in outputs and t.name not in kept]:
        yield "caches", f"no {forgotten[0]!r}", "every input that has an updated output"
    if spec.caches != tuple(t.name for t in spec.inputs if t.name in spec.caches):
        yield "caches", "another order than that of the inputs", "the inputs' order"
    if spec.draft_vocab > spec.vocab_size > 0:
        yield "draft_vocab", str(spec.draft_vocab), f"at most vocab_size {spec.vocab_size}"
    if spec.num_candidates > spec.dist_width > 0:
        yield "num_candidates", str(spec.num_candidates), f"at most {spec.dist_width}"


def _borrowed(spec: GraphSpec, specs: Mapping[str, GraphSpec]) -> Iterator[tuple[str, str, str]]:
    inputs = {t.name for t in spec.inputs}
    for held in spec.borrowed:
        owner = specs.get(held.owner)
        if held.name not in inputs or owner is None or owner is spec or held.cache not in owner.caches:
            got = f"{held.name!r} of {held.cache!r} in {held.owner!r}"
            yield "borrowed", got, "an input of this graph, and a cache of another graph of the bundle"
