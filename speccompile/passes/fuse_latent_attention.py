# SPDX-License-Identifier: Apache-2.0
"""CachedAttention whose K is V too -> LatentAttention, which writes one cache: for our CPU kernels."""

from __future__ import annotations

import onnx_ir as ir

from speccompile.ops.cached_attention import CACHED_ATTENTION, LATENT_ATTENTION
from speccompile.passes.base import as_pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, nodes_of


@as_pass()
def fuse_latent_attention(model: ir.Model) -> int:
    """Replace every CachedAttention that is given one cache as K and V; returns their number."""
    nodes = [
        node
        for node in nodes_of(model, CACHED_ATTENTION.name, OPS_DOMAIN)
        if node.inputs[1] is node.inputs[2] and node.inputs[3] is node.inputs[4] and not node.outputs[2].uses()
    ]
    for node in nodes:
        query, key, _, cache, _, lengths, mask = node.inputs
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        inputs = (query, key, cache, lengths, mask)
        made = Editor(model, node).op(LATENT_ATTENTION.name, *inputs, domain=OPS_DOMAIN, num_outputs=2, **attributes)
        for old, new in zip(node.outputs, made, strict=False):
            new.type, new.shape = old.type, old.shape
            for position, output in enumerate(model.graph.outputs):
                if output is old:
                    new.name = old.name
                    model.graph.outputs[position] = new
            old.replace_all_uses_with(new)
        model.graph.remove(node, safe=True)
    return len(nodes)
