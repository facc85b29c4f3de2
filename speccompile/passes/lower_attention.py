# SPDX-License-Identifier: Apache-2.0
"""CachedAttention, SinkAttention -> TensorScatter in place + folded Attention(24), for ONNX Runtime.

SharedAttention -> the same Attention over another layer's caches. The query heads of one group are folded into the rows
([batch, kv_heads, group * nodes, head_dim]), so each K and V row is read once per kv head. Where a group is one head,
the last node's row stands there twice: ONNX Runtime's kernel for a product of one row sums in another order, so that a
step of one node would not have the bits of a longer one. The additive mask is made once per tree and window: a boolean
one would be converted in every layer, and `nonpad_kv_seqlen` makes the kernel no shorter.
"""

from __future__ import annotations

import onnx_ir as ir

from speccompile.passes.attention_mask import AttentionMasks, size_of, tree_of, window_of
from speccompile.passes.base import Property, as_pass
from speccompile.passes.edit import Editor, attentions_of, replace, shared_attentions_of, sinks_of


def _find_neutral(model: ir.Model) -> str | None:
    nodes = [*attentions_of(model), *shared_attentions_of(model)]
    return None if not nodes else f"{len(nodes)} {nodes[0].op_type} nodes are left"


_ROWS, _END = 2, 2**63 - 1  # the axis of nodes; the end of any axis

ATTENTION_LOWERED = Property("attention_lowered", _find_neutral)


@as_pass(ensures=(ATTENTION_LOWERED,))
def lower_attention(model: ir.Model) -> int:
    """Lower every attention over the graph's caches; returns their number."""
    nodes, readers = attentions_of(model), shared_attentions_of(model)
    if not nodes:
        return 0
    trees: dict[ir.Value, AttentionMasks] = {}
    for node in nodes:  # readers see the tree of the layer whose caches they read
        if tree_of(node) not in trees:
            trees[tree_of(node)] = AttentionMasks(model, node, _cache_of(node))
    kinds = {node: _kind(node, 3) for node in nodes} | {node: _kind(node, 1) for node in readers}
    made = {kind: trees[kind[0]].make(*kind[1:]) for kind in dict.fromkeys(kinds.values())}
    for kind, mask in made.items():
        if kind[2] == 1:
            made[kind] = _with_last_twice(trees[kind[0]].edit, mask)
    for node in nodes:
        key, value, k_cache, v_cache, lengths = node.inputs[1:6]
        edit = Editor(model, node)
        k_all = edit.op("TensorScatter", k_cache, key, lengths, axis=2, mode="linear")
        v_all = edit.op("TensorScatter", v_cache, value, lengths, axis=2, mode="linear")
        replace(node, _attend(edit, node, k_cache, (k_all, v_all), made[kinds[node]]), k_all, v_all)
    for node in readers:
        k_all, v_all = node.inputs[1:3]
        assert k_all is not None and v_all is not None
        replace(node, _attend(Editor(model, node), node, k_all, (k_all, v_all), made[kinds[node]]))
    return len(nodes) + len(readers)


def _kind(node: ir.Node, k_index: int) -> tuple[ir.Value, int, int]:
    return tree_of(node, k_index), window_of(node), size_of(node.inputs[0], 1) // size_of(node.inputs[k_index], 1)


def _attend(
    edit: Editor, node: ir.Node, k_cache: ir.Value | None, rows: tuple[ir.Value, ir.Value], mask: ir.Value
) -> ir.Value:
    """Returns the attention of `node` over the updated caches `rows`, [batch, nodes, heads, head_dim].

    `mask` is of its window and group; where that is one head, the last row stands there twice.
    """
    query = node.inputs[0]
    kv_heads, heads, head_dim = size_of(k_cache, 1), size_of(query, 1), size_of(k_cache, 3)
    is_folded = heads != kv_heads
    fold = edit.ints([0, kv_heads, -1, head_dim])
    folded = edit.op("Reshape", query, fold) if is_folded else _with_last_twice(edit, query)
    softcap = node.attributes["softcap"].as_float() if "softcap" in node.attributes else 0.0
    inputs, scale, sinks = (folded, *rows, mask), node.attributes["scale"].as_float(), sinks_of(node)
    share = None
    if sinks is None:
        out = edit.op("Attention", *inputs, scale=scale, softcap=softcap)
    else:
        out, share = _attend_with_sinks(edit, inputs, scale, sinks, heads)
    if is_folded:
        out = edit.op("Reshape", out, edit.ints([0, heads, -1, head_dim]))
    if share is not None:
        out = edit.op("Mul", out, share)
    if not is_folded:
        out = edit.op("Slice", out, edit.ints([0]), edit.ints([-1]), edit.ints([_ROWS]))
    transposed: ir.Value = edit.op("Transpose", out, perm=[0, 2, 1, 3])
    return transposed


def _with_last_twice(edit: Editor, rows: ir.Value | None) -> ir.Value:
    last = edit.op("Slice", rows, edit.ints([-1]), edit.ints([_END]), edit.ints([_ROWS]))
    repeated: ir.Value = edit.op("Concat", rows, last, axis=_ROWS)
    return repeated


def _attend_with_sinks(
    edit: Editor, inputs: tuple[ir.Value | None, ...], scale: float, sinks: ir.Value, heads: int
) -> tuple[ir.Value, ir.Value]:
    """Returns attention without sinks, and the factor of each of its rows [batch, heads, nodes, 1].

    A sink adds a term to the softmax's sum, so the factor is a sigmoid of the logarithm of the sum before it less the
    sink. A column for the sink would copy both caches.
    """
    out, present_k, present_v, scores = edit.op(
        "Attention", *inputs, num_outputs=4, scale=scale, qk_matmul_output_mode=2
    )
    present_k.name = present_v.name = ""  # not asked for: they would be copies
    total = edit.op("ReduceLogSumExp", scores, edit.ints([-1]), keepdims=1)
    total = edit.op("Reshape", total, edit.ints([0, heads, -1, 1]))
    share: ir.Value = edit.op("Sigmoid", edit.op("Sub", total, edit.op("Reshape", sinks, edit.ints([1, heads, 1, 1]))))
    return out, share


def _cache_of(node: ir.Node) -> ir.Value:
    cache = node.inputs[3]
    assert cache is not None
    return cache
