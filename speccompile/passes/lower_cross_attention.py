# SPDX-License-Identifier: Apache-2.0
"""CrossAttention -> Attention under an additive mask, for ONNX Runtime and for TensorRT.

The caches belong to another engine and are read in place. As in the lowering of CachedAttention, ONNX Runtime gets a
group's query heads as rows, and TensorRT a Slice to the rows in use.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.core.specs import KV_ROWS
from speccompile.passes.attention_mask import HALF_HIDDEN_SCORE, HIDDEN_SCORE, size_of, window_of
from speccompile.passes.base import Property, as_pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, nodes_of, replace
from speccompile.passes.lower_attention_tensorrt import AttentionForm, attend, has_kernel

K_INDEX = 1  # of CrossAttention's inputs


def _find_neutral(model: ir.Model) -> str | None:
    nodes = nodes_of(model, "CrossAttention", OPS_DOMAIN)
    return None if not nodes else f"{len(nodes)} CrossAttention nodes are left"


CROSS_ATTENTION_LOWERED = Property("cross_attention_lowered", _find_neutral)
_Masks = dict[tuple[ir.Value, int, int], ir.Value]


def _mask(
    edit: Editor, limits: ir.Value, num_rows: ir.Value, group: int, window: int, dtype: ir.DataType, made: _Masks
) -> ir.Value:
    """Returns the additive mask [batch, 1, group * nodes, rows], repeated for each query head of a group."""
    if (limits, group, window) not in made:
        hidden = HALF_HIDDEN_SCORE if dtype == ir.DataType.FLOAT16 else HIDDEN_SCORE
        constants = (
            edit.const(v.astype(dtype.numpy()), n)
            for v, n in ((np.float32(0), "mask.visible"), (hidden, "mask.hidden"))
        )
        rows = edit.op("Range", edit.ints(0), edit.op("Squeeze", num_rows), edit.ints(1))
        ends = edit.op("Unsqueeze", limits, edit.ints([2]))
        is_seen = edit.op("Less", rows, ends)
        if window:
            oldest = edit.op("Sub", ends, edit.ints(window))
            is_seen = edit.op("And", is_seen, edit.op("GreaterOrEqual", rows, oldest))
        mask = edit.op("Where", is_seen, *constants)
        folded = mask if group == 1 else edit.op("Concat", *[mask] * group, axis=1)
        made[limits, group, window] = edit.op("Unsqueeze", folded, edit.ints([1]))
    return made[limits, group, window]


@as_pass(ensures=(CROSS_ATTENTION_LOWERED,))
def lower_cross_attention(model: ir.Model) -> int:
    """Lower every CrossAttention for ONNX Runtime; returns their number."""
    nodes, made = nodes_of(model, "CrossAttention", OPS_DOMAIN), _Masks()
    for node in nodes:
        query, k_cache, v_cache, limits = node.inputs
        assert query is not None and k_cache is not None and limits is not None
        edit = Editor(model, node)
        heads, kv_heads, head_dim = size_of(query, 1), size_of(k_cache, 1), size_of(k_cache, 3)
        num_rows, group = edit.op("Shape", k_cache, start=2, end=3), heads // kv_heads
        mask = _mask(edit, limits, num_rows, group, window_of(node), ir.DataType.FLOAT, made)
        folded = query if heads == kv_heads else edit.op("Reshape", query, edit.ints([0, kv_heads, -1, head_dim]))
        out = edit.op("Attention", folded, k_cache, v_cache, mask, scale=node.attributes["scale"].as_float())
        if heads != kv_heads:
            out = edit.op("Reshape", out, edit.ints([0, heads, -1, head_dim]))
        replace(node, edit.op("Transpose", out, perm=[0, 2, 1, 3]))
    return len(nodes)


@as_pass(ensures=(CROSS_ATTENTION_LOWERED,))
def lower_cross_attention_tensorrt(model: ir.Model) -> int:
    """Lowers every CrossAttention for TensorRT over the rows in use (`kv_rows`), or all; returns their number."""
    nodes, made = nodes_of(model, "CrossAttention", OPS_DOMAIN), _Masks()
    for node in nodes:
        query, k_cache, v_cache, limits = node.inputs
        assert query is not None and k_cache is not None and limits is not None and k_cache.dtype is not None
        edit = Editor(model, node)
        num_rows = _rows_in_use(model, edit, k_cache)
        is_fused = has_kernel(size_of(k_cache, 3), k_cache.dtype)
        group = 1 if is_fused else size_of(query, 1) // size_of(k_cache, 1)
        form = AttentionForm(is_fused, 0, group, 0.0)
        mask = _mask(edit, limits, num_rows, group, window_of(node), k_cache.dtype, made)
        used = [edit.op("Slice", cache, edit.ints([0]), num_rows, edit.ints([2])) for cache in (k_cache, v_cache)]
        replace(node, attend(edit, node, form, used[0], used[1], mask, K_INDEX))
    return len(nodes)


def _rows_in_use(model: ir.Model, edit: Editor, k_cache: ir.Value) -> ir.Value:
    held = {value.name: value for value in model.graph.inputs}
    rows, axis = (held[KV_ROWS], 0) if KV_ROWS in held else (k_cache, 2)
    found: ir.Value = edit.op("Shape", rows, start=axis, end=axis + 1)
    return found
