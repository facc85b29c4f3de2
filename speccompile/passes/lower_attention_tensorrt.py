# SPDX-License-Identifier: Apache-2.0
"""CachedAttention -> TensorScatter in place + Attention over the rows in use, for TensorRT; SharedAttention alike.

TensorRT's Attention silently ignores `nonpad_kv_seqlen`, supports no softcap, and multiplies the whole K cache by a
`scale`. Without the Slice to the rows in use it copies the cache and repeats K and V for every query head (TensorRT-RTX
1.7.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from speccompile.core.specs import KV_ROWS, GraphSpec
from speccompile.passes.attention_mask import AttentionMasks, size_of, tree_of, window_of
from speccompile.passes.base import Pass, Property
from speccompile.passes.edit import Editor, attentions_of, input_of, nodes_of, replace, shared_attentions_of, sinks_of
from speccompile.passes.lower_attention import ATTENTION_LOWERED

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def has_kernel(head_dim: int, dtype: ir.DataType | None) -> bool:
    """Whether TensorRT's Attention supports heads of this size; others are lowered to matrix products.

    (The node attribute TRT_decomposable has the same effect, but no other reader of ONNX accepts it.)
    """
    return dtype in _HALVES and head_dim % 8 == 0 and 16 <= head_dim <= 256


def _find_dynamic_cache(model: ir.Model) -> str | None:
    for node in nodes_of(model, "TensorScatter"):
        cache = node.inputs[0]
        if cache is None or cache.shape is None or not isinstance(cache.shape[2], int):
            return f"the rows of {None if cache is None else cache.name} are not static"
    return None


CACHES_STATIC = Property("caches_static", _find_dynamic_cache)


def make_caches_static(model: ir.Model, spec: GraphSpec) -> int:
    """Set the dims of the caches and their updates from `spec`; returns the number of caches."""
    dims = {t.name: t.dims for t in (*spec.inputs, *spec.outputs)}
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = ir.Shape(list(dims[str(value.name)]))
    return len(spec.caches)


@dataclass(frozen=True)
class AttentionForm:
    """How one CachedAttention is lowered."""

    fused: bool
    window: int
    group: int  # query heads of a kv head that become rows of it; 1 for an Attention node, which supports groups
    softcap: float
    sinks: ir.Value | None = None


def form_of(node: ir.Node, fused: bool | None, k_index: int = 3) -> AttentionForm:
    """Returns the form of one CachedAttention; `fused` as in `lower_attention_tensorrt`, `k_index` as in `attend`."""
    cache = node.inputs[k_index]
    softcap = node.attributes["softcap"].as_float() if "softcap" in node.attributes else 0.0
    wanted = has_kernel(size_of(cache, 3), cache.dtype if cache is not None else None) if fused is None else fused
    sinks = sinks_of(node)
    if wanted and not softcap and sinks is None:
        return AttentionForm(True, window_of(node), 1, 0.0)
    return AttentionForm(False, window_of(node), size_of(node.inputs[0], 1) // size_of(cache, 1), softcap, sinks)


def _lower(model: ir.Model, node: ir.Node, form: AttentionForm, mask: ir.Value, num_rows: ir.Value) -> None:
    _, key, value, k_cache, v_cache, lengths = node.inputs[:6]
    edit = Editor(model, node)
    k_all = edit.op("TensorScatter", k_cache, key, lengths, axis=2, mode="linear")
    v_all = edit.op("TensorScatter", v_cache, value, lengths, axis=2, mode="linear")
    k_used, v_used = _used_rows(edit, num_rows, k_all, v_all)
    replace(node, attend(edit, node, form, k_used, v_used, mask), k_all, v_all)


def _used_rows(edit: Editor, num_rows: ir.Value, *caches: ir.Value | None) -> list[ir.Value]:
    return [edit.op("Slice", cache, edit.ints([0]), num_rows, edit.ints([2])) for cache in caches]


def attend(
    edit: Editor,
    node: ir.Node,
    form: AttentionForm,
    k_used: ir.Value,
    v_used: ir.Value,
    mask: ir.Value,
    k_index: int = 3,
) -> ir.Value:
    """Returns the attention over `k_used` and `v_used` under an additive mask, [batch, nodes, heads, head_dim].

    Input `k_index` of the node is its K cache.
    """
    query, k_cache = node.inputs[0], node.inputs[k_index]
    assert query is not None and k_cache is not None and k_cache.dtype is not None
    dtype, scale = k_cache.dtype, node.attributes["scale"].as_float()
    if scale != 1:
        query = edit.op("Mul", query, edit.const(np.float32(scale).astype(dtype.numpy()), "attention.scale"))
    if form.fused:
        out = edit.op("Attention", query, k_used, v_used, mask, scale=1.0)
    else:
        kv_heads, head_dim = size_of(k_cache, 1), size_of(k_cache, 3)
        if form.group > 1:
            query = edit.op("Reshape", query, edit.ints([0, kv_heads, -1, head_dim]))
        scores = edit.op("MatMul", query, edit.op("Transpose", k_used, perm=[0, 1, 3, 2]))
        out = edit.op("MatMul", _probs(edit, scores, form, mask, dtype), v_used)
        if form.group > 1:
            out = edit.op("Reshape", out, edit.ints([0, kv_heads * form.group, -1, head_dim]))
    transposed: ir.Value = edit.op("Transpose", out, perm=[0, 2, 1, 3])
    return transposed


def _probs(edit: Editor, scores: ir.Value, form: AttentionForm, mask: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Returns the float32 softmax of the capped and masked scores."""
    if form.softcap:
        cap = edit.const(np.float32(form.softcap).astype(dtype.numpy()), "attention.softcap")
        scores = edit.op("Mul", edit.op("Tanh", edit.op("Div", scores, cap)), cap)
    masked = edit.op("Add", scores, mask)
    if form.sinks is not None:
        masked = edit.op("Concat", masked, _sink_column(edit, scores, form.sinks, form.group, dtype), axis=3)
    if dtype != ir.DataType.FLOAT:
        masked = edit.op("Cast", masked, to=ir.DataType.FLOAT)
    probs: ir.Value = edit.op("Softmax", masked, axis=-1)
    if dtype != ir.DataType.FLOAT:
        probs = edit.op("Cast", probs, to=dtype)
    if form.sinks is not None:
        probs = edit.op("Slice", probs, edit.ints([0]), edit.ints([-1]), edit.ints([3]))
    return probs


def _sink_column(edit: Editor, scores: ir.Value, sinks: ir.Value, group: int, dtype: ir.DataType) -> ir.Value:
    first = edit.op("Slice", scores, edit.ints([0]), edit.ints([1]), edit.ints([3]))
    zeros = edit.op("Mul", first, edit.const(np.float32(0).astype(dtype.numpy()), "attention.zero"))
    by_head = edit.op("Reshape", zeros, edit.ints([0, 0, group, -1]))
    filled = edit.op("Add", by_head, edit.op("Reshape", sinks, edit.ints([1, -1, group, 1])))
    column: ir.Value = edit.op("Reshape", filled, edit.ints([0, 0, -1, 1]))
    return column


def lower_attention_tensorrt(model: ir.Model, fused: bool | None = None) -> int:
    """Lowers every attention over the graph's caches; returns their number.

    Args:
        model: has the input `kv_rows`; dtypes are final.
        fused: whether Attention nodes are used; None: where `has_kernel` says so.
    """
    nodes = attentions_of(model)
    if not nodes:
        return 0
    cache = nodes[0].inputs[3]
    assert cache is not None and cache.dtype is not None
    trees: dict[ir.Value, AttentionMasks] = {}
    for node in nodes:  # readers see the tree of the layer whose caches they read
        if tree_of(node) not in trees:
            trees[tree_of(node)] = AttentionMasks(model, node, input_of(model, KV_ROWS), 0, cache.dtype)
    readers, num_rows = shared_attentions_of(model), trees[tree_of(nodes[0])].num_rows
    forms = {node: form_of(node, fused) for node in nodes} | {node: form_of(node, fused, 1) for node in readers}
    seen = {node: tree_of(node) for node in nodes} | {node: tree_of(node, 1) for node in readers}
    kinds = {node: (seen[node], form.window, form.group) for node, form in forms.items()}
    made = {kind: trees[kind[0]].make(*kind[1:]) for kind in dict.fromkeys(kinds.values())}
    for node in nodes:
        _lower(model, node, forms[node], made[kinds[node]], num_rows)
    for node in readers:
        edit = Editor(model, node)
        k_used, v_used = _used_rows(edit, num_rows, *node.inputs[1:3])
        replace(node, attend(edit, node, forms[node], k_used, v_used, made[kinds[node]], 1))
    return len(nodes) + len(readers)


LOWER_ATTENTION_TENSORRT = Pass(
    "lower_attention_tensorrt", lower_attention_tensorrt, ensures=(ATTENTION_LOWERED, CACHES_STATIC)
)
