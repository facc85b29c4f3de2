# SPDX-License-Identifier: Apache-2.0
"""Predicted sizes against published parameter counts and against the example pair."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speccompile.backends.base import predict_float32
from speccompile.backends.tensorrt.backend import predicted_weight_bytes
from speccompile.checkpoints.checkpoint import count_params, read_dims
from speccompile.core import registry
from speccompile.core.dims import LayerDims, RecurrentDims
from speccompile.core.jobs import WeightCounts
from speccompile.recipe.predict import own_cache_bytes, predict

MODELS = Path(__file__).parents[2] / "examples" / "models"

# Published sizes of these models, in parameters.
KNOWN: list[tuple[dict[str, Any], float]] = [
    (
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "tie_word_embeddings": True},
        1_235_814_400,
    ),
    (
        {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36, "head_dim": 128,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288,
         "tie_word_embeddings": False},
        8_190_735_360,
    ),
    (
        {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
        124_439_808,
    ),
    (
        {"model_type": "gpt_bigcode", "vocab_size": 49152, "n_embd": 6144, "n_layer": 52, "n_head": 48,
         "n_inner": 24576, "n_positions": 8192, "multi_query": True},
        20_067_000_000,  # granite-20b-code
    ),
    (
        {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8,
         "tie_word_embeddings": False},
        46_702_792_704,
    ),
]  # fmt: skip


@pytest.mark.parametrize("name", ["onnxruntime", "reference"])
def test_every_quantisation_of_a_backend_has_a_size(name):
    backend = registry.backend(name)
    counts = WeightCounts(10_000, 9_000, 1_000, num_head=1_000)
    sizes = {q: backend.predict(counts, q, "float32") for q in backend.quantizations}
    assert all(0 < row.least_file_bytes <= row.file_bytes <= sizes["none"].file_bytes for row in sizes.values())


@pytest.mark.parametrize(("config", "expected"), KNOWN, ids=[str(c["model_type"]) for c, _ in KNOWN])
def test_parameters_of_known_models(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps({"n_positions": 4096, **config}))
    dims = read_dims(tmp_path)
    found = predict(config, dims, "none", slots=1, rows=1024).num_params
    # Biases and the norms of queries and keys are left out.
    assert found == pytest.approx(expected, rel=0.002)


def test_the_caches_that_a_draft_owns_are_counted():
    from speccompile.graph_kinds.features import FeatureDims, feature_draft_spec

    dims = FeatureDims(
        model_type="m", vocab_size=40, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        max_positions=64, target_hidden_size=32, intermediate_size=48, draft_vocab_size=40,
    )  # fmt: skip
    spec = feature_draft_spec("draft", dims, 4, False, 64)
    assert own_cache_bytes(spec, slots=3, rows=64, dtype="float16") == 3 * 64 * (2 * 2) * (2 * 8) * 2
    assert own_cache_bytes(replace(spec, caches=()), slots=3, rows=64, dtype="float16") == 0


@pytest.mark.parametrize("name", ["pycode-16m", "pycode-16m-draft"])
def test_parameters_of_the_example_pair_are_exact(name):
    config = json.loads((MODELS / name / "config.json").read_text())
    prediction = predict(config, read_dims(MODELS / name), "none", slots=8, rows=1024)
    assert prediction.num_params == count_params(MODELS / name)


def test_weights_and_caches_follow_the_recipe():
    config = json.loads((MODELS / "pycode-16m" / "config.json").read_text())
    dims = read_dims(MODELS / "pycode-16m")
    sizes = {q: predict(config, dims, q, slots=8, rows=1024).weights_bytes for q in ("none", "int8", "int4")}
    # Measured: 75.8 MB, 30.6 MB (blocks of 32) and 22.7 MB.
    assert sizes["none"] == pytest.approx(75_785_728, rel=0.02)
    assert sizes["int8"] == pytest.approx(30_565_888, rel=0.02)
    assert sizes["int4"] == pytest.approx(22_701_568, rel=0.02)
    # 2 caches x 8 layers x 2 heads x 64 x 4 bytes a token.
    assert predict(config, dims, "none", slots=8, rows=1024).cache_bytes == 8 * 1024 * 8192


def test_caches_and_states_of_each_layer_are_counted():
    config = {**json.loads((MODELS / "pycode-16m" / "config.json").read_text()), "tie_word_embeddings": True}
    plain = read_dims(MODELS / "pycode-16m")
    recurrent = LayerDims(recurrent=RecurrentDims(2, 4, 64, 64, 512, 4))
    dims = replace(plain, layer_dims=(recurrent, recurrent, recurrent, LayerDims(2, 64)) * 2)
    got = predict(config, dims, "none", slots=8, rows=1024, max_pending=5)
    # 2 caches x 2 layers x 2 heads x 64 x 4 bytes a token; a state and its snapshot in 6 layers.
    state = 4 * (4 * 64 * 64 + 5 * (2 * 64 + 4 * 64 + 8) + (3 + 5) * 512)
    assert got.cache_bytes == 8 * (1024 * 2048 + 2 * 6 * state)
    for name in ("onnxruntime", "tensorrt"):  # two buffers and a snapshot
        backend = registry.backend(name, "cuda")
        on_gpu = predict(config, dims, "none", slots=8, rows=1024, max_pending=5, backend=backend)
        assert on_gpu.cache_bytes == 8 * (1024 * 2048 + 3 * 6 * state)
    without = predict(config, plain, "none", slots=8, rows=1024)
    attention, mixer = 2 * (plain.num_heads + 2) * 64, 512 + 2 * 256 + 8
    assert got.num_params - without.num_params == 6 * (plain.hidden_size * (mixer - attention) + 512 * 4)


def test_experts_are_quantised_where_the_backend_packs_them():
    counts = WeightCounts(num_params=1000, num_linear=900, num_plain=100, num_experts=640)
    assert predict_float32(counts, "none").weights_bytes == 4000
    assert predict_float32(counts, "int4").weights_bytes == 260 * 0.625 // 1 + 640 * 0.5625 + 400
    assert predict_float32(counts, "int8").weights_bytes == int(260 * 1.125 + 640 * 1.0625) + 400
    assert predict_float32(counts, "int4", packs_experts=False).weights_bytes == int(260 * 0.625) + 2560 + 400
    scale = 2 / 128
    assert predicted_weight_bytes(counts, "none", "float16") == 2000
    assert predicted_weight_bytes(counts, "int8", "float16") == 260 + 640 * (1 + scale) + 200
    assert predicted_weight_bytes(counts, "int4", "float16") == int((260 + 640) * (0.5 + scale)) + 200


def test_shared_experts_and_dense_layers_are_no_chosen_experts(tmp_path):
    config = {"model_type": "glm4_moe", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3,
              "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "n_routed_experts": 8,
              "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64, **config}))
    whole = predict(config, read_dims(tmp_path), "none", slots=1, rows=64).num_params
    without = {**config, "n_routed_experts": 1, "intermediate_size": 1}
    base = predict(without, read_dims(tmp_path), "none", slots=1, rows=64).num_params - 3 * 3 * 32
    assert whole - base == 3 * 32 * 48 + 2 * (3 * 32 * 16 * (8 + 1) + 8 * 32)
