# SPDX-License-Identifier: Apache-2.0
"""The cache compaction graph: KVRollback alone, one node per cache or one for all of a size.

A plugin that compacts inside the target's step does so by its own verdict.
"""

from __future__ import annotations

import onnx_ir as ir

from speccompile.core import specs
from speccompile.core.specs import Dim, GraphSpec, compacted_cache_name, updated_cache_name
from speccompile.passes.edit import OPS_DOMAIN, Editor, add_input, input_of


def cache_groups(spec: GraphSpec) -> tuple[tuple[str, ...], ...]:
    """Returns the names in `spec.caches` by KV heads and width of a head, in the order of the first of each group."""
    groups: dict[tuple[Dim, Dim], list[str]] = {}
    for name in spec.caches:
        _, heads, _, width = spec.input(name).dims
        groups.setdefault((heads, width), []).append(name)
    return tuple(map(tuple, groups.values()))


def build_rollback(spec: GraphSpec, joined: bool = False) -> ir.Model:
    """Builds the graph that `rollback_spec` describes.

    Args:
        joined: one node over all caches of a size, which a plugin compacts in one launch; no body takes several.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24, OPS_DOMAIN: 1}, name=spec.name)
    model = ir.Model(graph, ir_version=11)
    values = {t.name: add_input(model, t.name, t.dims, t.dtype) for t in spec.inputs}
    lengths, path, edit = values[specs.LENGTHS], values[specs.PATH], Editor(model)
    groups = cache_groups(spec) if joined else tuple((name,) for name in spec.caches)
    updated = {}
    for names in groups:
        caches = [values[name] for name in names]
        num = len(names)
        attributes = {"num_caches": num} if num > 1 else {}
        made = edit.op("KVRollback", *caches, lengths, path, domain=OPS_DOMAIN, num_outputs=num, **attributes)
        for name, out in zip(names, made if num > 1 else [made], strict=True):
            out.name, out.shape, out.type = updated_cache_name(name), values[name].shape, values[name].type
            updated[name] = out
    graph.outputs.extend(updated[name] for name in spec.caches)
    return model


def attach_compaction(model: ir.Model, spec: GraphSpec) -> int:
    """Adds the nodes and their outputs after all others; returns the number of caches.

    Args:
        model: with the updated caches and `path` among its outputs.
    """
    outputs = {v.name: v for v in model.graph.outputs}
    lengths, path, edit, compacted = input_of(model, specs.LENGTHS), outputs[specs.PATH], Editor(model), {}
    for names in cache_groups(spec):
        updated, num = [outputs[updated_cache_name(name)] for name in names], len(names)
        # TensorRT asks a plugin for the number of its outputs before it passes the inputs.
        attributes = {"num_caches": num} if num > 1 else {}
        made = edit.op("KVRollback", *updated, lengths, path, domain=OPS_DOMAIN, num_outputs=num, **attributes)
        for name, value, cache in zip(names, made if num > 1 else [made], updated, strict=True):
            value.name, value.shape, value.type = compacted_cache_name(name), cache.shape, cache.type
            compacted[name] = value
    model.graph.outputs.extend(compacted[name] for name in spec.caches)
    return len(compacted)
