# SPDX-License-Identifier: Apache-2.0
"""Heads -> rotary embedding -> CrossAttention -> rows becomes one RotaryCrossAttention op of our CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from speccompile.ops.cross_attention import ROTARY_CROSS_ATTENTION
from speccompile.passes.attention_mask import window_of
from speccompile.passes.base import as_pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, nodes_of, replace
from speccompile.passes.fuse_qkv_attention import Heads, Rotary, heads_of
from speccompile.passes.match import ints, only_use


@dataclass(frozen=True)
class _Match:
    node: ir.Node
    q: Heads
    rotary: Rotary
    reshape: ir.Node  # of the output to rows


def _match(node: ir.Node) -> _Match | None:
    q, reshape = heads_of(node.inputs[0]), only_use(node.outputs[0])
    if (
        window_of(node)
        or q is None
        or q.rotary is None
        or q.norm is not None
        or reshape is None
        or reshape.op_type != "Reshape"
    ):
        return None
    is_rows = ints(reshape.inputs[1]) in ([0, 0, q.num * q.head_dim], [0, 0, -1])
    return _Match(node, q, q.rotary, reshape) if is_rows else None


def _fuse(model: ir.Model, match: _Match) -> None:
    q, rotary = match.q, match.rotary
    _, k_cache, v_cache, limits = match.node.inputs
    attributes: dict[str, Any] = {
        "num_heads": q.num,
        "head_dim": q.head_dim,
        "scale": match.node.attributes["scale"].as_float(),
    }
    attributes |= {"rotary_dim": rotary.rotary_dim, "interleaved": rotary.interleaved}
    inputs = (q.rows, rotary.cos, rotary.sin, k_cache, v_cache, rotary.positions, limits)
    edit = Editor(model, match.node)
    rows = edit.op(ROTARY_CROSS_ATTENTION.name, *inputs, domain=OPS_DOMAIN, **attributes)
    rows.type, rows.shape = match.reshape.outputs[0].type, match.reshape.outputs[0].shape
    replace(match.reshape, rows)
    model.graph.remove(match.node, safe=True)


@as_pass()
def fuse_cross_attention(model: ir.Model) -> int:
    """Fuse every such CrossAttention; returns their number. Nodes that are then unused stay, for `remove_dead`."""
    matches = [m for node in nodes_of(model, "CrossAttention", OPS_DOMAIN) if (m := _match(node)) is not None]
    for match in matches:
        _fuse(model, match)
    return len(matches)
