# SPDX-License-Identifier: Apache-2.0
"""One KVRollback over all caches of a size, where a plugin compacts inside the target's step, by its own verdict."""

from __future__ import annotations

import onnx_ir as ir

from speccompile.core import specs
from speccompile.core.specs import GraphSpec, compacted_cache_name, updated_cache_name
from speccompile.passes.base import Pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, input_of
from speccompile.passes.rollback import cache_groups


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


def attach_compaction_pass(spec: GraphSpec) -> Pass:
    return Pass("attach_compaction", lambda model: attach_compaction(model, spec))
