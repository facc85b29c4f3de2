# SPDX-License-Identifier: Apache-2.0
"""CachedAttention -> TensorScatter in place + folded Attention(24), for ONNX Runtime.

The query heads of one group are folded into the rows ([batch, kv_heads, group * nodes, head_dim]), so each K
and V row is read once per kv head. The additive mask is made once per distinct window and shared by all layers:
a boolean mask would be converted in every layer, and `nonpad_kv_seqlen` makes the kernel no shorter.
"""

from __future__ import annotations

import onnx_ir as ir

from speccompile.passes.attention_mask import AttentionMasks, size_of, window_of
from speccompile.passes.base import Pass, Property
from speccompile.passes.edit import OPS_DOMAIN, Editor, nodes_of, replace


def _find_neutral(model: ir.Model) -> str | None:
    nodes = nodes_of(model, "CachedAttention", OPS_DOMAIN)
    return None if not nodes else f"{len(nodes)} CachedAttention nodes are left"


ATTENTION_LOWERED = Property("attention_lowered", _find_neutral)


def lower_attention(model: ir.Model) -> int:
    """Lower every CachedAttention; returns their number."""
    nodes = nodes_of(model, "CachedAttention", OPS_DOMAIN)
    if not nodes:
        return 0
    masks = AttentionMasks(model, nodes[0], _cache_of(nodes[0]))
    kinds = [(window_of(n), size_of(n.inputs[0], 1) // size_of(n.inputs[3], 1)) for n in nodes]
    made = {kind: masks.make(*kind) for kind in dict.fromkeys(kinds)}
    for node, kind in zip(nodes, kinds, strict=True):
        query, key, value, k_cache, v_cache, lengths, _ = node.inputs
        edit = Editor(model, node)
        kv_heads, heads = size_of(k_cache, 1), size_of(query, 1)
        k_all = edit.op("TensorScatter", k_cache, key, lengths, axis=2, mode="linear")
        v_all = edit.op("TensorScatter", v_cache, value, lengths, axis=2, mode="linear")
        folded = (
            query if heads == kv_heads else edit.op("Reshape", query, edit.ints([0, kv_heads, -1, size_of(k_cache, 3)]))
        )
        softcap = node.attributes["softcap"].as_float() if "softcap" in node.attributes else 0.0
        out = edit.op(
            "Attention", folded, k_all, v_all, made[kind], scale=node.attributes["scale"].as_float(), softcap=softcap
        )
        if heads != kv_heads:
            out = edit.op("Reshape", out, edit.ints([0, heads, -1, size_of(k_cache, 3)]))
        replace(node, edit.op("Transpose", out, perm=[0, 2, 1, 3]), k_all, v_all)
    return len(nodes)


def _cache_of(node: ir.Node) -> ir.Value:
    cache = node.inputs[3]
    assert cache is not None
    return cache


LOWER_ATTENTION = Pass("lower_attention", lower_attention, ensures=(ATTENTION_LOWERED,))
