# SPDX-License-Identifier: Apache-2.0
"""Attach LoRA adapters that a request chooses: LowRank after each linear that has some; those of merged linears merge.

Linears are found by the names of their weights, which the export gives them: MODULE.weight.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from speccompile.checkpoints.lora import Factors
from speccompile.core.specs import ADAPTER, SCORED_NODES, TOKENS
from speccompile.errors import CheckpointError
from speccompile.passes.base import as_pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, add_input, input_of, nodes_of, weight_of
from speccompile.passes.match import int_attribute, ints, only_use, rank
from speccompile.passes.merge_linears import bias_of


def attach_adapters(model: ir.Model, factors: Mapping[str, Factors]) -> int:
    """Adds the input `adapter` and a LowRank after the linear of each module; returns their number.

    Raises:
        CheckpointError: a module is no linear over the nodes' rows in the graph, or has another shape.
    """
    before = next(i for i, value in enumerate(model.graph.inputs) if value.name == SCORED_NODES) + 1
    adapter = add_input(model, ADAPTER, ("batch",), "int64", before)
    linears = _linears(model)
    for module, held in factors.items():
        node = linears.get(f"{module}.weight")
        if node is None:
            expected = "linear layers over the rows of all nodes, in the decoder's layers"
            todo = "Merge it into the weights (target.lora), or train the adapter without that module."
            raise CheckpointError(f"{held.file} ({module})", "a part that has no adapter here", expected, todo)
        _attach(model, module, node, adapter, held)
    model.opset_imports[OPS_DOMAIN] = 1
    return len(factors)


def _linears(model: ir.Model) -> dict[str, ir.Node]:
    """Returns the products of the rows [batch, nodes, in] by the name of their weight, if that has one alone."""
    rows = tuple(input_of(model, TOKENS).shape or ())
    found: dict[str, list[ir.Node]] = {}
    for node in nodes_of(model, "MatMul"):
        x, value = node.inputs
        if x is not None and x.shape is not None and rank(x) == 3 and tuple(x.shape[:2]) == rows:
            weight = weight_of(value)
            if weight is not None and value is not None and len(weight.shape) == 2:
                found.setdefault(str(value.name).removesuffix(".transposed"), []).append(node)
    return {name: nodes[0] for name, nodes in found.items() if len(nodes) == 1}


def _attach(model: ir.Model, module: str, node: ir.Node, adapter: ir.Value, held: Factors) -> None:
    bias = bias_of(node)
    end = (node if bias is None else bias[0]).outputs[0]
    edit = Editor(model)
    a, b = edit.const(held.a, f"{module}.adapters.a"), edit.const(held.b, f"{module}.adapters.b")
    _insert(model, end, (node.inputs[0], adapter, a, b))


def _insert(model: ir.Model, base: ir.Value, inputs: tuple[ir.Value | None, ...]) -> None:
    """Puts a LowRank after a value that is computed, in front of all its readers."""
    readers, node = list(base.uses()), base.producer()
    assert node is not None
    low_rank = ir.Node(OPS_DOMAIN, "LowRank", [base, *inputs])
    model.graph.insert_after(node, low_rank)
    y = low_rank.outputs[0]
    y.type, y.shape = base.type, base.shape
    for use in readers:
        use.node.replace_input_with(use.idx, y)


@as_pass()
def merge_adapters(model: ir.Model) -> int:
    """Puts one LowRank before each Split of a merged linear whose parts have some; returns their number."""
    count = 0
    for split in nodes_of(model, "Split"):
        found = [_low_rank_of(part) for part in split.outputs]
        held = [node for node in found if node is not None]
        merged = split.inputs[0]
        if held and merged is not None and len(split.inputs) > 1 and int_attribute(split, "axis", 0) in (-1, 2):
            _merge(model, split, merged, found)
            count += 1
    return count


def _low_rank_of(part: ir.Value) -> ir.Node | None:
    use = only_use(part)
    return use if use is not None and use.op_type == "LowRank" and use.inputs[0] is part else None


def _merge(model: ir.Model, split: ir.Node, merged: ir.Value, found: list[ir.Node | None]) -> None:
    edit, held = Editor(model, split), [node for node in found if node is not None]
    widths = ints(split.inputs[1]) or []
    pairs = [[weight_of(value) for value in node.inputs[3:]] for node in held]
    factors = [(a.numpy(), b.numpy()) for a, b in pairs if a is not None and b is not None]
    stacked = np.concatenate([a for a, _ in factors], axis=1)
    spread = np.zeros((*stacked.shape[:2], sum(widths)), np.float32)
    row, column = 0, 0
    for node, width in zip(found, widths, strict=True):
        if node is not None:
            b = factors[held.index(node)][1]
            spread[:, row : row + b.shape[1], column : column + width] = b
            row += b.shape[1]
        column += width
    name = "+".join(str(node.inputs[3].name).removesuffix(".a") for node in held if node.inputs[3] is not None)
    constants = edit.const(stacked, f"{name}.a"), edit.const(spread, f"{name}.b")
    y = edit.op("LowRank", merged, *held[0].inputs[1:3], *constants, domain=OPS_DOMAIN)
    known = held[0].outputs[0].shape
    y.type, y.shape = merged.type, None if known is None else ir.Shape([*known.dims[:-1], sum(widths)])
    split.replace_input_with(0, y)
    for node in held:
        part, values = node.inputs[0], node.inputs[3:]
        assert part is not None
        node.outputs[0].replace_all_uses_with(part)
        model.graph.remove(node, safe=True)
        for value in values:
            if value is not None and not value.uses():
                del model.graph.initializers[str(value.name)]
