# SPDX-License-Identifier: Apache-2.0
"""Programs that need no decomposition are rewritten and compute the same; all others are decomposed by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from speccompile.export import decompose

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
def test_a_simple_program_is_rewritten_and_computes_the_same(function: Module) -> None:
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
def test_another_program_is_decomposed(function: Module) -> None:
    program, x = program_of(function)
    assert not decompose.is_simplified(program, set())
    with decompose.decompose_if_needed():
        decomposed = program.run_decompositions({})
    assert decomposed is not program
    if function is not change_what_dropout_may_return:  # torch 2.13 itself takes its result for new memory
        assert torch.equal(run(decomposed, x), function(x.clone()))


def test_an_operator_without_a_translation_is_decomposed() -> None:
    program, _ = program_of(halves)
    assert decompose.is_simplified(program, {ATEN.add.Tensor})
    assert not decompose.is_simplified(program, {ATEN.sub.Tensor})


def test_torchs_own_method_is_there_again() -> None:
    before = torch.export.ExportedProgram.run_decompositions
    with decompose.decompose_if_needed():
        assert torch.export.ExportedProgram.run_decompositions is not before
    assert torch.export.ExportedProgram.run_decompositions is before


# What a rewrite without one of the conditions would compute: each of them is needed.
MUTANTS: dict[str, tuple[Module, dict[str, Callable[..., Any]]]] = {
    "views that are read": (change_what_a_view_reads, {"_is_fresh": lambda node: True}),
    "memory of others": (change_a_view, {"_is_own": lambda node: True}),
    "composite operators": (change_what_dropout_may_return, {"_is_fresh": lambda node: True}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_without_a_condition_a_program_computes_something_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, changes = MUTANTS[name]
    program, x = program_of(function)
    for attribute, value in changes.items():
        monkeypatch.setattr(decompose, attribute, value)
    assert decompose.is_simplified(program, set())
    assert not torch.equal(run(program, x), function(x.clone()))
