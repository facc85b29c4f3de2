# SPDX-License-Identifier: Apache-2.0
"""The dtype that `auto` means with TensorRT, and the options with which a graph is compiled."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from speccompile.backends.tensorrt import import_helper
from speccompile.bundle.choices import choose_dtype
from speccompile.bundle.graphs import compile_options, open_source
from speccompile.checkpoints.config_values import POSITION_COLUMNS
from speccompile.errors import RecipeError
from speccompile.ops.int8_caches import quantize_rows
from speccompile.prepare import plan_from_source
from speccompile.recipe.model_recipe import ModelOptions
from tests.pipeline import fakes

GEMMA = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
TEXT = {"model_type": "gemma3_text"}


@pytest.fixture
def made(monkeypatch, tmp_path):
    """(changes of the config, settings, GPUs of this machine, dtype of tensors) -> the plan's dtype, by two ways."""

    def make(changes, settings=(), gpus=(), tensors=None):
        monkeypatch.setattr(import_helper, "find_compute_capabilities", lambda: tuple(gpus))
        fakes.make_checkpoint(tmp_path / "model")
        config = json.loads((tmp_path / "model/config.json").read_text())
        (tmp_path / "model/config.json").write_text(json.dumps({**config, **changes}))
        if tensors is not None:
            save_file({"norm.weight": np.ones(8, tensors)}, tmp_path / "model/model.safetensors")
        recipe = tmp_path / "r.yaml"
        recipe.write_text("target: {model: model}\nengine: {backend: tensorrt, max_seq_len: 48, max_draft_nodes: 7}\n")
        plan = choose_dtype(fakes.make_plan(recipe, *settings))
        assert plan_from_source(str(recipe), ModelOptions(settings=settings)).dtype == plan.dtype
        assert plan.recipe_from_plan()["target"]["dtype"] == plan.dtype and not plan.chooses_dtype
        return plan.dtype

    return make


@pytest.mark.parametrize(
    ("changes", "settings", "gpus", "wanted"),
    [
        ({"dtype": "bfloat16"}, (), (), "bfloat16"),
        ({"torch_dtype": "bfloat16"}, (), (), "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, (), ((8, 0),), "bfloat16"),
        ({**GEMMA, "torch_dtype": "bfloat16", "text_config": TEXT}, (), ((8, 9),), "bfloat16"),
        ({**GEMMA, "text_config": {**TEXT, "torch_dtype": "bfloat16"}}, (), (), "bfloat16"),
        ({"torch_dtype": "float16"}, (), (), "float16"),
        ({"model_type": "qwen2", "torch_dtype": "float16"}, (), (), "float16"),
        ({"torch_dtype": "float32"}, (), (), "float16"),  # Llamas hold it
        ({"model_type": "gpt2", "torch_dtype": "float32"}, (), (), "bfloat16"),
        ({"torch_dtype": "bfloat16"}, (), ((7, 5),), "float16"),
        ({"torch_dtype": "bfloat16"}, (), ((9, 0), (7, 5)), "float16"),
        ({"torch_dtype": "bfloat16"}, ("engine.tensorrt.compute_capabilities=[7.5, 12.0]",), (), "float16"),
        ({"torch_dtype": "bfloat16"}, ("engine.tensorrt.compute_capabilities=[8.6]",), ((7, 5),), "bfloat16"),
        ({"torch_dtype": "bfloat16"}, ("target.dtype=float16",), (), "float16"),
        ({"torch_dtype": "float16"}, ("target.dtype=bfloat16",), (), "bfloat16"),
        ({"torch_dtype": "bfloat16"}, ("engine.backend=onnxruntime",), (), "float32"),
    ],
)
def test_auto_follows_the_checkpoint(made, changes, settings, gpus, wanted):
    assert made(changes, settings, gpus) == wanted


@pytest.mark.parametrize(("tensors", "wanted"), [(np.float16, "float16"), (np.float32, "bfloat16")])
def test_a_config_without_a_dtype_leaves_it_to_the_tensors(made, tensors, wanted):
    assert made({"model_type": "qwen2"}, tensors=tensors) == wanted


def test_a_gpu_that_has_float16_alone_is_warned_of(made, caplog):
    made({"model_type": "gemma2", "torch_dtype": "bfloat16"}, gpus=((7, 5),))
    assert "gemma2 is built in float16, whose range it may exceed" in caplog.text


@pytest.mark.parametrize(("rows", "nodes"), [(1024, 16), (100, 3), (24, 7)])
def test_cache_rows_hold_a_padded_step_and_keep_slots_aligned(rows, nodes):
    engine = SimpleNamespace(max_draft_nodes=nodes, max_batch_size=4, kv_cache="auto")
    options = compile_options(SimpleNamespace(engine=engine, options=None, dtype="float16"), rows)
    assert rows + nodes + 1 <= options.max_rows < rows + nodes + 9
    assert 2 * options.max_rows * 16 % 256 == 0  # a head of 16 halves is the narrowest


def test_a_graph_without_caches_has_no_rows():
    engine = SimpleNamespace(max_draft_nodes=4, max_batch_size=4, kv_cache="auto")
    assert compile_options(SimpleNamespace(engine=engine, options=None, dtype="float16"), 0).max_rows == 0


def test_int8_caches_are_refused_for_keys_that_hold_positions(tmp_path):
    """256 * high + low in two columns that share a scale: of position 511 the high one is lost."""
    assert quantize_rows(np.array([[1, 255]], np.float32))[0].tolist() == [[0, 127]]
    config = {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 2, "vocab_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = f"target: {{model: {tmp_path}, weights: random, quantization: none}}\nspeculator: {{method: none}}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    for settings in ((), ("engine.kv_cache=int8",)):
        plan = fakes.make_plan(tmp_path / "recipe.yaml", *settings)
        if not settings:
            assert open_source(plan, plan.target, None).dims.head_dim == 32 + POSITION_COLUMNS
            continue
        with pytest.raises(RecipeError, match=r"engine\.kv_cache: got int8 for bloom, whose keys hold positions"):
            open_source(plan, plan.target, None)
