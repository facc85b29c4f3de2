# SPDX-License-Identifier: Apache-2.0
"""The attention of an unrolled draft for TensorRT, which refuses a second update of a cache in one graph.

Each step attends to the rows of the cache and, behind them, to the fresh rows of all steps so far. In the end one
TensorScatter a cache writes the fresh rows, gathered into order: a slot that read fewer tokens than the widest has
padding between its own tokens and those it drafted.
"""

from __future__ import annotations

import onnx_ir as ir

from speccompile.core.specs import KV_ROWS, LENGTHS, SCORED_NODES
from speccompile.passes.attention_mask import AttentionMasks
from speccompile.passes.base import Pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, input_of, nodes_of
from speccompile.passes.lower_attention import ATTENTION_LOWERED
from speccompile.passes.lower_attention_tensorrt import CACHES_STATIC, AttentionForm, attend, form_of

_CACHES = (3, 4)  # inputs of CachedAttention; its outputs 1 and 2 are their updates


def chains_of(model: ir.Model) -> list[list[ir.Node]]:
    """The CachedAttention nodes of each layer in the order of steps."""
    chains = []
    for node in nodes_of(model, "CachedAttention", OPS_DOMAIN):
        cache = node.inputs[_CACHES[0]]
        if cache is None or not cache.is_graph_input():
            continue
        chain: list[ir.Node] = [node]
        while following := [n for n, index in chain[-1].outputs[1].uses() if index == _CACHES[0]]:
            chain.append(following[0])
        chains.append(chain)
    return chains


class _Masks(AttentionMasks):
    """The additive masks of all steps: [batch, 1, queries, rows of the cache + nodes of the first step + steps].

    The cache holds what is past for every step. Behind the first step its nodes are rows like any other: those up to
    the scored one are visible, and a node's position is its row.
    """

    def __init__(self, model: ir.Model, anchor: ir.Node, dtype: ir.DataType) -> None:
        super().__init__(model, anchor, input_of(model, KV_ROWS), 0, dtype)
        edit = self.edit
        self.scored = edit.op("Unsqueeze", input_of(model, SCORED_NODES), edit.ints([2]))  # [batch, 1, 1]
        self.num_nodes = edit.op("Shape", self.tree, start=2, end=3)
        self.nodes = edit.op("Range", edit.ints(0), edit.op("Squeeze", self.num_nodes), edit.ints(1))
        self._made: dict[tuple[int, int], ir.Value] = {}

    def step(self, step: int, form: AttentionForm) -> ir.Value:
        """The mask of one step for one sliding window, repeated for each query head of a group."""
        edit, key = self.edit, (step, form.window)
        if key not in self._made:
            visible = self._first(form.window) if step == 0 else self._later(step, form.window)
            self._made[key] = edit.op("Where", visible, self.visible, self.hidden)
        mask = self._made[key]
        folded = mask if form.group == 1 else edit.op("Concat", *[mask] * form.group, axis=1)
        unsqueezed: ir.Value = edit.op("Unsqueeze", folded, edit.ints([1]))
        return unsqueezed

    def _first(self, window: int) -> ir.Value:
        """[batch, nodes, rows + nodes] bool: as a step of its own would see."""
        edit, tree = self.edit, self.tree
        past = edit.op("Less", self.rows, self.length_column)
        if window:
            gap = edit.op("Sub", self.depth, edit.op("Transpose", self.depth, perm=[0, 2, 1]))
            tree = edit.op("And", tree, edit.op("Less", gap, edit.ints(window)))
            oldest = edit.op("Sub", edit.op("Add", self.depth, self.length_column), edit.ints(window))
            past = edit.op("And", past, edit.op("Greater", self.rows, oldest))
        past = edit.op("Expand", past, self.shape)
        seen: ir.Value = edit.op("Concat", past, tree, axis=2)
        return seen

    def _later(self, step: int, window: int) -> ir.Value:
        """[batch, 1, rows + nodes + step] bool."""
        edit = self.edit
        past = edit.op("Less", self.rows, self.length_column)
        nodes = edit.op("LessOrEqual", self.nodes, self.scored)
        if window:
            last = edit.op("Add", self.scored, edit.ints(step - window))  # node behind which the window begins
            past = edit.op("And", past, edit.op("Greater", self.rows, edit.op("Add", last, self.length_column)))
            nodes = edit.op("And", nodes, edit.op("Greater", self.nodes, last))
        own = edit.op("GreaterOrEqual", self.scored, edit.ints(0))  # true: a step sees itself
        never = edit.op("Less", self.scored, edit.ints(0))
        drafted = [own if not window or step - j < window else never for j in range(1, step + 1)]
        seen: ir.Value = edit.op("Concat", past, nodes, *drafted, axis=2)
        return seen


def _order(model: ir.Model, masks: _Masks, num_steps: int) -> ir.Value:
    """[batch, 1, nodes + num_steps - 1, 1] int64: which fresh row stands at each place behind `lengths`."""
    edit = masks.edit
    width = edit.op("Add", masks.num_nodes, edit.ints([num_steps - 1]))
    place = edit.op("Range", edit.ints(0), edit.op("Squeeze", width), edit.ints(1))
    scored = input_of(model, SCORED_NODES)
    padding = edit.op("Sub", edit.op("Sub", masks.num_nodes, edit.ints([1])), scored)  # [batch, 1]
    moved = edit.op("Min", edit.op("Add", place, padding), edit.op("Sub", width, edit.ints([1])))
    is_own = edit.op("LessOrEqual", place, scored)
    ordered: ir.Value = edit.op("Unsqueeze", edit.op("Where", is_own, place, moved), edit.ints([1, 3]))
    return ordered


def _write(model: ir.Model, chain: list[ir.Node], order: ir.Value) -> list[ir.Value]:
    """The two updates of a layer's caches."""
    edit, updates = Editor(model), []
    lengths = input_of(model, LENGTHS)
    for side, index in enumerate(_CACHES):
        cache = chain[0].inputs[index]
        assert cache is not None
        fresh = edit.op("Concat", *(node.inputs[1 + side] for node in chain), axis=2)
        slots_heads = edit.op("Shape", fresh, start=0, end=2)
        shape = edit.op("Concat", slots_heads, edit.op("Shape", order, start=2, end=4), axis=0)
        rows = edit.op("GatherND", fresh, edit.op("Expand", order, shape), batch_dims=2)
        updates.append(edit.op("TensorScatter", cache, rows, lengths, axis=2, mode="linear"))
    return updates


def lower_draft_tensorrt(model: ir.Model, fused: bool | None = None) -> int:
    """Lower every CachedAttention of an unrolled draft; returns their number.

    Args:
        model: unrolled, has the input `kv_rows`; dtypes are final.
        fused: whether Attention nodes are used; None: where TensorRT has a kernel.
    """
    chains = chains_of(model)
    if not chains:
        return 0
    cache = chains[0][0].inputs[_CACHES[0]]
    assert cache is not None and cache.dtype is not None
    masks = _Masks(model, chains[0][0], cache.dtype)
    order = _order(model, masks, len(chains[0]))
    forms = {node: form_of(node, fused) for chain in chains for node in chain}
    kinds = dict.fromkeys((step, forms[node]) for chain in chains for step, node in enumerate(chain))
    made = {kind: masks.step(*kind) for kind in kinds}  # before their place in the graph goes
    updates = [_write(model, chain, order) for chain in chains]
    for chain, (k_all, v_all) in zip(chains, updates, strict=True):
        held = [_past(model, chain[0], chain[0].inputs[index], masks.num_rows) for index in _CACHES]
        for position, output in enumerate(model.graph.outputs):
            for new, old in ((k_all, chain[-1].outputs[1]), (v_all, chain[-1].outputs[2])):
                if output is old:
                    new.name, new.shape, new.type, old.name = old.name, old.shape, old.type, None
                    model.graph.outputs[position] = new
        attended = []
        for step, node in enumerate(chain):
            edit = Editor(model, node)
            keys, values = (
                edit.op("Concat", past, *(n.inputs[1 + side] for n in chain[: step + 1]), axis=2)
                for side, past in enumerate(held)
            )
            attended.append(attend(edit, node, forms[node], keys, values, made[step, forms[node]]))
        for node, out in reversed(list(zip(chain, attended, strict=True))):
            node.outputs[0].replace_all_uses_with(out)
            model.graph.remove(node, safe=True)
    return len(forms)


def _past(model: ir.Model, anchor: ir.Node, cache: ir.Value | None, num_rows: ir.Value) -> ir.Value:
    edit = Editor(model, anchor)
    rows: ir.Value = edit.op("Slice", cache, edit.ints([0]), num_rows, edit.ints([2]))
    return rows


LOWER_DRAFT_TENSORRT = Pass("lower_draft_tensorrt", lower_draft_tensorrt, ensures=(ATTENTION_LOWERED, CACHES_STATIC))
