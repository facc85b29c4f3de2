# SPDX-License-Identifier: Apache-2.0
"""Programs that need no decomposition are rewritten and compute the same; all others are decomposed by torch.

So with type promotion, which runs nothing that it leaves alone, and with blocks that switch gradients off again.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch._export.passes import replace_set_grad_with_hop_pass
from torch.onnx._internal.exporter import _fx_passes
from torch.onnx._internal.fx.passes import type_promotion

from speccompile.export import decompose
from speccompile.export.trace import RULES, simplify
from speccompile.ops.op import OPSET
from tests.lab.graphs import run_session

ATEN = torch.ops.aten
Module = Callable[[torch.Tensor], torch.Tensor]


def convert(x: torch.Tensor) -> torch.Tensor:
    return (x.float() + x.to(torch.int64).type_as(x)).to(torch.float64)


def same_conversion_at_the_end(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).to(torch.float32)


def logic(x: torch.Tensor) -> torch.Tensor:
    low, high = x < 0.3, x > 0.1
    return (low & high) | (x > 0.5) ^ (x < 0)


def halves(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return first - second


def divide_in_place(x: torch.Tensor) -> torch.Tensor:
    weights, indices = torch.topk(x, 2)
    total = weights.sum(-1, keepdim=True)
    weights /= total
    return weights * indices + weights


def add_to_the_only_view(x: torch.Tensor) -> torch.Tensor:
    product = (x * 2)[:, None].squeeze(1)
    product += x
    return product.exp()


def change_a_result(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y += 1
    return y


SIMPLE: tuple[Module, ...] = (
    *(convert, same_conversion_at_the_end, logic, halves),
    *(divide_in_place, add_to_the_only_view, change_a_result),
)


def change_an_input(x: torch.Tensor) -> torch.Tensor:
    x += 1
    return x * 2


def change_what_a_view_reads(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    row = y[0]
    y += 1
    return row * 3


def change_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[0] += 1
    return y * 3


def change_what_dropout_may_return(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = torch.nn.functional.dropout(y, training=False)
    z += 1
    return y * 3


def change_a_copy(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    z = y.to(torch.float32, copy=True)
    z += 1
    return y * z


def transpose_without_a_translation(x: torch.Tensor) -> torch.Tensor:
    return x.T + 1


OTHERS: tuple[Module, ...] = (
    *(change_an_input, change_what_a_view_reads, change_a_view, change_what_dropout_may_return),
    *(change_a_copy, transpose_without_a_translation),
)


def program_of(function: Module) -> tuple[Any, torch.Tensor]:
    class Wrapped(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    x = torch.arange(12.0).reshape(3, 4).sin()
    return torch.export.export(Wrapped(), (x.clone(),), strict=False), x


def run(program: Any, x: torch.Tensor) -> torch.Tensor:
    program.graph_module.recompile()
    return program.module(check_guards=False)(x.clone())


def targets(program: Any) -> list[Any]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("function", SIMPLE, ids=lambda f: f.__name__)
def test_a_simple_program_is_rewritten_and_computes_the_same(function):
    program, x = program_of(function)
    assert decompose.is_simplified(program, set())
    for called in targets(program):
        assert (
            called not in decompose._CONVERSIONS and not getattr(called, "_schema", ATEN.add.Tensor._schema).is_mutable
        )
    assert torch.equal(run(program, x), function(x.clone()))
    with decompose.decompose_if_needed():
        assert program.run_decompositions({}) is program


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_another_program_is_decomposed(function):
    program, x = program_of(function)
    assert not decompose.is_simplified(program, set())
    with decompose.decompose_if_needed():
        decomposed = program.run_decompositions({})
    assert decomposed is not program
    if function is not change_what_dropout_may_return:  # torch 2.13 itself takes its result for new memory
        assert torch.equal(run(decomposed, x), function(x.clone()))


def test_an_operator_without_a_translation_is_decomposed():
    program, _ = program_of(halves)
    assert decompose.is_simplified(program, {ATEN.add.Tensor})
    assert not decompose.is_simplified(program, {ATEN.sub.Tensor})


def test_torchs_own_method_is_there_again():
    before = torch.export.ExportedProgram.run_decompositions
    with decompose.decompose_if_needed():
        assert torch.export.ExportedProgram.run_decompositions is not before
    assert torch.export.ExportedProgram.run_decompositions is before


def mixed_dtypes(x: torch.Tensor) -> torch.Tensor:
    index, low = torch.arange(4), (x < 0.3)
    return (x * index + low) / index.sum() + x.double() ** 2 + torch.where(low, x, 1)


def promoted(function: Module) -> tuple[list[str], Any, torch.Tensor]:
    """Returns the nodes after the exporter's type promotion, the program and its input."""
    program, x = program_of(function)
    _fx_passes.insert_type_promotion_nodes(program.graph_module)
    nodes = [
        f"{n.name} {n.target} {n.args} {n.kwargs} {getattr(n.meta.get('val'), 'dtype', None)}"
        for n in nodes_of(program)
    ]
    return nodes, program, x


def nodes_of(program: Any) -> list[Any]:
    return list(program.graph.nodes)


@pytest.mark.parametrize("function", [mixed_dtypes, logic, divide_in_place, halves], ids=lambda f: f.__name__)
def test_type_promotion_that_runs_only_what_it_changes_has_the_same_result(function):
    expected, *_ = promoted(function)
    ran = []
    execute = torch.fx.Interpreter.run_node
    with decompose.promote_without_running(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.fx.Interpreter, "run_node", lambda self, node: ran.append(node) or execute(self, node))
        nodes, program, x = promoted(function)
    assert nodes == expected
    assert torch.equal(run(program, x), function(x.clone()))
    called = [node for node in nodes_of(program) if node.op == "call_function"]
    assert len([node for node in ran if node in called]) < len(called)
    conversions = [node for node in called if node.target is torch.ops.prims.convert_element_type.default]
    assert bool(conversions) == (function in (mixed_dtypes, divide_in_place))


def off_within(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.exp()
    return x * off_in_a_function(scale)


@torch.no_grad()
def off_in_a_function(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_blocks_without_gradients_leave_no_trace_where_they_are_off(monkeypatch):
    splits = []
    split = replace_set_grad_with_hop_pass.sequential_split
    name = "sequential_split"
    monkeypatch.setattr(replace_set_grad_with_hop_pass, name, lambda *args: splits.append(args) or split(*args))
    with decompose.without_grad():
        program, x = program_of(off_within)
        assert not torch.is_grad_enabled()
        with torch.enable_grad():  # a block inside still switches them off
            with torch.no_grad():
                assert not torch.is_grad_enabled()
            assert torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert not splits and targets(program) == [ATEN.exp.default, ATEN.add.Tensor, ATEN.mul.Tensor]
    assert torch.equal(run(program, x), off_within(x.clone()))
    with torch.no_grad():
        program_of(off_within)
    assert splits


def test_gradients_and_torchs_own_methods_are_there_again_after_an_error():
    kinds = (
        (torch.no_grad, "__enter__"),
        (torch.no_grad, "__exit__"),
        (type_promotion._TypePromotionInterpreter, "run_node"),
    )
    before = [getattr(kind, name) for kind, name in kinds]
    with suppress(ValueError), decompose.without_grad(), decompose.promote_without_running():
        assert all(getattr(kind, name) is not was for (kind, name), was in zip(kinds, before, strict=True))
        raise ValueError
    assert [getattr(kind, name) for kind, name in kinds] == before
    assert torch.is_grad_enabled()


# What a rewrite without one of the conditions would compute: each of them is needed.
MUTANTS: dict[str, tuple[Module, dict[str, Callable[..., Any]]]] = {
    "views that are read": (change_what_a_view_reads, {"_is_fresh": lambda node: True}),
    "memory of others": (change_a_view, {"_is_own": lambda node: True}),
    "composite operators": (change_what_dropout_may_return, {"_is_fresh": lambda node: True}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_without_a_condition_a_program_computes_something_else(name, monkeypatch):
    function, changes = MUTANTS[name]
    program, x = program_of(function)
    for attribute, value in changes.items():
        monkeypatch.setattr(decompose, attribute, value)
    assert decompose.is_simplified(program, set())
    assert not torch.equal(run(program, x), function(x.clone()))


def redundant_model() -> ir.Model:
    """Returns ((x * 1 transposed twice) as float32 + (2 + 3)) cut into its halves."""

    def value(name: str, size: int = 4) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, size]))

    def op(kind: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        node = ir.node(kind, inputs, attributes or None)
        nodes.append(node)
        return node.outputs[0]

    nodes: list[ir.Node] = []
    x, low, high = value("x"), value("low", 2), value("high", 2)
    ints = [op("Constant", value_ints=[number]) for number in (0, 2, 4, 1)]
    one, two, three = (op("Constant", value_float=number) for number in (1.0, 2.0, 3.0))
    y = op("Transpose", op("Transpose", op("Mul", x, one), perm=[1, 0]), perm=[1, 0])
    y = op("Cast", y, to=ir.DataType.FLOAT.value)
    y = op("Add", y, op("Add", two, three))
    op("Neg", y)  # nobody reads it
    start, middle, end, axis = ints
    nodes.append(ir.Node("", "Slice", [y, start, middle, axis], outputs=[low]))
    nodes.append(ir.Node("", "Slice", [y, middle, end, axis], outputs=[high]))
    return ir.Model(ir.Graph([x], [low, high], nodes=nodes, opset_imports={"": OPSET}), ir_version=12)


def test_no_ops_and_unused_nodes_go_constants_are_folded_and_results_stay():
    model, x = redundant_model(), np.arange(8, dtype=np.float32).reshape(2, 4)
    before = run_session(model, {"x": x})
    simplify(model)
    assert Counter(node.op_type for node in model.graph) == {"Add": 1, "Slice": 2}
    for got, wanted in zip(run_session(model, {"x": x}), before, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_every_rule_ends_in_one_node():
    """With more of them, onnxscript compares every node with all others: time grows with the square of the nodes."""
    assert [rule for rule in RULES if not rule._target_pattern.has_single_output_node] == []
