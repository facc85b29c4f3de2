# SPDX-License-Identifier: Apache-2.0
"""A draft that samples one token -> a draft that samples a chain of them in one run.

The graph is repeated as it is, lowered or neutral: what does not depend on the step (weights and what unpacks them,
the request's warp) is shared by all steps. Every step appends to the caches that the one before has written.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from speccompile.core import specs
from speccompile.core.specs import GraphSpec, step_cache_name, updated_cache_name
from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor, input_of

_STEP_INPUTS = (specs.TOKENS, specs.LENGTHS, specs.TREE_MASK, specs.SCORED_NODES, specs.UNIFORMS)
_LASTING_DIMS = ("batch", "max_seq", "kv", "vocab", "draft_vocab")

Values = dict[ir.Value, ir.Value]


def _step_nodes(model: ir.Model, spec: GraphSpec) -> list[ir.Node]:
    """The nodes that compute something else in every step."""
    varying = {input_of(model, name) for name in (*_STEP_INPUTS, *spec.caches)}
    nodes = []
    for node in model.graph:
        if any(value in varying for value in node.inputs if value is not None):
            nodes.append(node)
            varying.update(node.outputs)
    return nodes


def _shape_of_step(value: ir.Value) -> ir.Shape | None:
    """The shape of a value in a step of one node: sizes that hang on the nodes of the first step are not known."""
    if value.shape is None:
        return None
    names = [d if isinstance(d, int) else str(d.value) for d in value.shape]
    dims = [1 if d in ("nodes", "scored") else d if isinstance(d, int) or d in _LASTING_DIMS else None for d in names]
    return ir.Shape(dims)


def _repeat(edit: Editor, nodes: list[ir.Node], given: Mapping[ir.Value, ir.Value]) -> Values:
    """Copies of `nodes` that read `given` in the place of its keys; returns what stands for which value."""
    made: Values = dict(given)
    for node in nodes:
        inputs = [made.get(value, value) if value is not None else None for value in node.inputs]
        copied = ir.Node(
            node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs)
        )
        edit.graph.append(copied)
        for old, new in zip(node.outputs, copied.outputs, strict=True):
            new.shape, new.type = _shape_of_step(old), old.type
            made[old] = new
    return made


class _Chain:
    """Collects what the steps sample."""

    def __init__(self, model: ir.Model) -> None:
        self.results = {v.name: v for v in model.graph.outputs}
        self.columns: dict[str, list[ir.Value]] = {}
        self.edit = Editor(model)

    def add(self, made: Values) -> ir.Value:
        """Take one step's results; returns its token."""
        pairs = (
            (specs.SAMPLED_TOKENS, specs.SAMPLED_TOKEN),
            (specs.CONFIDENCES, specs.CONFIDENCE),
            (specs.SAMPLED_LAWS, specs.SAMPLED_PROBS),
        )
        for chain, single in pairs:
            value = made.get(self.results[single], self.results[single])
            self.columns.setdefault(chain, []).append(self.edit.op("Unsqueeze", value, self.edit.ints([1])))
        token = self.results[specs.SAMPLED_TOKEN]
        return made.get(token, token)

    def outputs(self) -> dict[str, ir.Value]:
        """The chain's outputs by name; the root has no law, its row is zero."""
        edit, laws = self.edit, self.columns[specs.SAMPLED_LAWS]
        laws.insert(0, edit.op("Sub", laws[0], laws[0]))
        return {name: edit.op("Concat", *values, axis=1) for name, values in self.columns.items()}


def unroll_draft(model: ir.Model, spec: GraphSpec) -> int:
    """Unroll in place; returns the number of steps.

    Args:
        model: has the inputs and outputs of `stepwise_spec(spec)`; its caches may have outputs in any lowered form
            that keeps the names.
        spec: an `unrolled_spec`.
    """
    num_steps = spec.output(specs.SAMPLED_TOKENS).dims[1]
    assert isinstance(num_steps, int)
    nodes, edit = _step_nodes(model, spec), Editor(model)
    tokens, lengths, tree_mask, scored, uniforms = (input_of(model, name) for name in _STEP_INPUTS)
    uniforms.shape = ir.Shape(list(spec.input(specs.UNIFORMS).dims))
    caches = {c: {v.name: v for v in model.graph.outputs}[updated_cache_name(c)] for c in spec.caches}
    first = Editor(model, nodes[0])
    first_draw = first.op("Gather", uniforms, first.ints(0), axis=1)
    for use in [u for u in uniforms.uses() if u.node is not first_draw.producer()]:
        use.node.replace_input_with(use.idx, first_draw)
    place = edit.op("Add", lengths, edit.op("Squeeze", scored, edit.ints([1])))
    alone = edit.op("GreaterOrEqual", edit.op("Unsqueeze", lengths, edit.ints([1, 2])), edit.ints(0))
    root = edit.op("Sub", scored, scored)
    chain = _Chain(model)
    made: Values = {}
    for step in range(1, num_steps + 1):
        token = chain.add(made)
        if step == num_steps:
            break
        made = _repeat(
            edit,
            nodes,
            {
                tokens: edit.op("Unsqueeze", token, edit.ints([1])),
                lengths: edit.op("Add", place, edit.ints(step)),
                tree_mask: alone,
                scored: root,
                first_draw: edit.op("Gather", uniforms, edit.ints(step), axis=1),
                **{input_of(model, c): made.get(value, value) for c, value in caches.items()},
            },
        )
    _set_outputs(model, spec, {**chain.outputs(), **_last_caches(caches, made)})
    return num_steps


def _last_caches(caches: Mapping[str, ir.Value], made: Values) -> dict[str, ir.Value]:
    return {updated_cache_name(cache): made.get(value, value) for cache, value in caches.items()}


def _set_outputs(model: ir.Model, spec: GraphSpec, values: Mapping[str, ir.Value]) -> None:
    old = {v.name: v for v in model.graph.outputs}
    for value in old.values():
        value.name = f"{value.name}.0"  # a result of the first step, inside the graph from now on
    for tensor in spec.outputs:
        value = values[tensor.name]
        value.name, value.shape = tensor.name, ir.Shape(list(tensor.dims))
        if tensor.name in old:
            value.type = old[tensor.name].type
        else:
            value.type = ir.TensorType(ir.DataType.INT64 if tensor.dtype == "int64" else ir.DataType.FLOAT)
    model.graph.outputs[:] = [values[t.name] for t in spec.outputs]


def expose_cache_steps(model: ir.Model, spec: GraphSpec) -> int:
    """Make every update of a cache an output, so that a runtime that binds outputs to memory writes all in place.

    Returns:
        The number of outputs added: all inner updates, in the order of caches and steps.
    """
    held = {v.name: v for v in model.graph.outputs}
    count = 0
    for cache in spec.caches:
        inner: list[ir.Value] = []
        value: ir.Value | None = held[updated_cache_name(cache)]
        while value is not None and (node := value.producer()) is not None:
            assert node.op_type == "TensorScatter", f"{cache} is updated by {node.op_type}"
            value = node.inputs[0]
            if value is not None and value.producer() is not None:
                inner.insert(0, value)
        for step, update in enumerate(inner):
            update.name, update.shape = step_cache_name(cache, step), held[updated_cache_name(cache)].shape
            model.graph.outputs.append(update)
        count += len(inner)
    return count


def unroll_draft_pass(spec: GraphSpec) -> Pass:
    """The pass to `spec`, an `unrolled_spec` or its TensorRT form; see `unroll_draft`."""
    return Pass("unroll_draft", lambda model: unroll_draft(model, spec))


def expose_cache_steps_pass(spec: GraphSpec) -> Pass:
    """See `expose_cache_steps`."""
    return Pass("expose_cache_steps", lambda model: expose_cache_steps(model, spec))
