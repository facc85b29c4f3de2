# SPDX-License-Identifier: Apache-2.0
"""The cache compaction graph: one KVRollback a cache, nothing else."""

from __future__ import annotations

import onnx_ir as ir

from speccompile.core import specs
from speccompile.core.specs import GraphSpec, updated_cache_name
from speccompile.passes.edit import OPS_DOMAIN, Editor, add_input


def build_rollback(spec: GraphSpec) -> ir.Model:
    """The graph that `rollback_spec` describes."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24, OPS_DOMAIN: 1}, name=spec.name)
    model = ir.Model(graph, ir_version=11)
    values = {t.name: add_input(model, t.name, t.dims, t.dtype) for t in spec.inputs}
    edit = Editor(model)
    for name in spec.caches:
        out = edit.op("KVRollback", values[name], values[specs.LENGTHS], values[specs.PATH], domain=OPS_DOMAIN)
        out.name, out.shape, out.type = updated_cache_name(name), values[name].shape, values[name].type
        graph.outputs.append(out)
    return model
