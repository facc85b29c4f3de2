# SPDX-License-Identifier: Apache-2.0
"""What is refused of recurrent layers when a build looks for its graphs, before anything is exported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from speccompile.bundling import graphs
from speccompile.core import registry
from speccompile.errors import BuildError, RecipeError
from tests.backends.hybrid_lab import DIMS, hybrid_spec
from tests.pipeline.fakes import make_plan, write_recipe


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose graphs all have recurrent states."""
    source = SimpleNamespace(max_rows=48, spec=hybrid_spec, check=lambda: None, dims=DIMS)
    monkeypatch.setattr(graphs, "open_source", lambda *given: source)
    return write_recipe(tmp_path)


def test_a_draft_with_recurrent_layers_is_refused(recipe: Path) -> None:
    plan = make_plan(recipe)
    with pytest.raises(RecipeError, match=r"small with recurrent layers \(state.0\) as the graph 'draft'") as caught:
        graphs.find_graph(plan, plan.drafts[0], DIMS, registry.backend("onnxruntime"))
    assert caught.value.where == "speculator.model" and "not yet" in caught.value.expected


def test_a_tree_for_a_target_with_recurrent_layers_is_refused(recipe: Path) -> None:
    plan = make_plan(recipe, "speculator.tree=auto")
    with pytest.raises(RecipeError, match="got auto; expected chain") as caught:
        graphs.find_graph(plan, plan.target, None, registry.backend("onnxruntime"))
    assert caught.value.where == "speculator.tree"


def test_a_device_without_states_refuses_the_target(recipe: Path) -> None:
    plan = make_plan(recipe)
    with pytest.raises(BuildError, match="recurrent states of target"):
        graphs.find_graph(plan, plan.target, None, registry.backend("onnxruntime", "cuda"))
