# SPDX-License-Identifier: Apache-2.0
"""A method for these tests, so that recipes are tested without a real one."""

import sys
import types
from dataclasses import dataclass
from typing import Literal

import pytest

from speccompile.core import registry
from speccompile.core.jobs import DraftBounds, GraphJob, TargetOutputs
from speccompile.core.registry import Method
from speccompile.recipe.models import Quantization


@dataclass(frozen=True)
class PlainConfig:
    """No keys."""

    draft_bounds = DraftBounds()


@dataclass(frozen=True)
class CandidateConfig:
    """Keys of every type that a method may have."""

    model: str
    quantization: Quantization = "none"
    num_draft_tokens: int | Literal["auto"] = "auto"
    widths: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if isinstance(self.num_draft_tokens, int) and self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens is {self.num_draft_tokens}, at least 1 is needed")

    @property
    def draft_bounds(self) -> DraftBounds:
        return DraftBounds(0 if self.num_draft_tokens == "auto" else self.num_draft_tokens)


class PlainMethod(Method):
    name = "none"
    Config = PlainConfig


class CandidateMethod(Method):
    name = "candidate"
    Config = CandidateConfig

    def graph_jobs(self, config: CandidateConfig) -> tuple[GraphJob, ...]:
        return (GraphJob("draft", config.model, config.quantization),)

    def target_outputs(self, config: CandidateConfig) -> TargetOutputs:
        return TargetOutputs(hidden=True, hidden_layers=(1,))


REAL = dict(registry.METHODS)


@pytest.fixture
def real_methods(methods: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the real methods back."""
    monkeypatch.setattr(registry, "METHODS", REAL)


@pytest.fixture(autouse=True)
def methods(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("methods_of_the_recipe_tests")
    module.PlainMethod, module.CandidateMethod = PlainMethod, CandidateMethod  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    table = {"none": f"{module.__name__}:PlainMethod", "candidate": f"{module.__name__}:CandidateMethod"}
    monkeypatch.setattr(registry, "METHODS", table)
