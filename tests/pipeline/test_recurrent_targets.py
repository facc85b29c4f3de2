# SPDX-License-Identifier: Apache-2.0
"""What is refused of recurrent layers when a build looks for its graphs, before anything is exported."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from speccompile.backends.tensorrt.config import Config
from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.bundle import graphs
from speccompile.core import registry
from speccompile.core.dims import LayerDims, RecurrentDims
from speccompile.core.jobs import CompileOptions
from speccompile.errors import BuildError, RecipeError
from speccompile.graph_kinds.decoder import decoder_spec
from tests.backends.hybrid_lab import DIMS, hybrid_spec
from tests.pipeline.fakes import make_plan, write_recipe


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose graphs all have recurrent states."""
    source = SimpleNamespace(max_rows=48, spec=hybrid_spec, check=lambda: None, dims=DIMS)
    monkeypatch.setattr(graphs, "open_source", lambda *given: source)
    return write_recipe(tmp_path)


def test_a_draft_with_recurrent_layers_is_refused(recipe):
    plan = make_plan(recipe)
    with pytest.raises(RecipeError, match=r"small with recurrent layers \(state.0\) as the graph 'draft'") as caught:
        graphs.find_graph(plan, plan.drafts[0], DIMS, registry.backend("onnxruntime"))
    assert caught.value.where == "speculator.model" and "not yet" in caught.value.expected


@pytest.mark.parametrize("name", ["onnxruntime", "tensorrt"])
def test_a_tree_for_a_target_with_recurrent_layers_is_refused_on_a_gpu(recipe, name):
    plan = make_plan(recipe, "speculator.tree=auto")
    with pytest.raises(RecipeError, match=r"got auto; expected chain: .* alone on this backend and device") as caught:
        graphs.find_graph(plan, plan.target, None, registry.backend(name, "cuda"))
    assert caught.value.where == "speculator.tree"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_target_with_recurrent_layers_is_taken_on_both_devices(device):
    registry.backend("onnxruntime", device).check(hybrid_spec(), CompileOptions(), "none")


@pytest.mark.parametrize(("name", "device"), [("onnxruntime", "cuda"), ("tensorrt", "cuda")])
def test_states_without_any_cache_are_refused_on_a_gpu(name, device):
    dims = replace(DIMS, layer_dims=(DIMS.layer_dims[0],) * 2)
    with pytest.raises(BuildError, match=r"got recurrent states and no K/V cache; .*engine\.backend: onnxruntime"):
        registry.backend(name, device).check(decoder_spec("target", dims, max_pending=5), CompileOptions(), "none")


def test_tensorrt_aligns_the_states_or_refuses_them_by_name():
    backend, spec = registry.backend("tensorrt"), hybrid_spec()
    options = CompileOptions("float16", 2, 104, 5, Config(variant="tensorrt_rtx"))
    assert (spec.max_pending, tensorrt_spec(spec, "float16", 104).max_pending) == (5, 16)
    backend.check(spec, options, "none")
    odd = RecurrentDims(1, 2, 4, 4, conv_channels=16, conv_kernel=3)
    spec = decoder_spec("target", replace(DIMS, layer_dims=(LayerDims(recurrent=odd), LayerDims(1, 8))), max_pending=5)
    with pytest.raises(BuildError, match=r"got state\.0 of \(2, 4, 4\) a slot; expected a multiple of 256 bytes"):
        backend.check(spec, options, "none")
    backend.check(spec, replace(options, max_slots=1), "none")
