# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: merged weights are those of the formula, and what is not merged is refused by name."""

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from speccompile.checkpoints.lora import LoraAdapter, digests_of_adapter, open_lora
from speccompile.checkpoints.target_tables import digests_from_target, read_tables
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.errors import CheckpointError
from speccompile.export import attention
from speccompile.export.lora import merge_lora
from speccompile.export.weights import load_model
from tests.checkpoints.lora_files import PREFIX, factors, linear_shapes, small_model, write_adapter

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def expected(model: Any, tensors: dict[str, torch.Tensor], scales: dict[str, float]) -> dict[str, torch.Tensor]:
    """Returns a model's parameters with W + s B A, in float64."""
    made = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    for module, scale in scales.items():
        a, b = (tensors[f"{PREFIX}{module}.lora_{side}.weight"].double() for side in "AB")
        made[f"{module}.weight"] = made[f"{module}.weight"] + scale * b @ a
    return made


def assert_equal(model: Any, wanted: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), wanted[name].numpy(), rtol=2e-6, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("config", "scale"),
    [({}, 4.0), ({"use_rslora": True}, 8 / math.sqrt(2)), ({"lora_alpha": 3}, 1.5), ({"r": 4}, 2.0)],
    ids=["plain", "rslora", "alpha", "rank"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_are_added(config, scale, dtype, tmp_path):
    model = small_model()
    tensors = {k: t.to(dtype) for k, t in factors(linear_shapes(model), config.get("r", 2)).items()}
    wanted = expected(model, tensors, dict.fromkeys(linear_shapes(model), scale))
    untouched = model.model.layers[0].self_attn.k_proj.weight.detach().clone()
    merge_lora(model, LoraAdapter(write_adapter(tmp_path, tensors, **config)))
    assert_equal(model, wanted)
    assert torch.equal(untouched, model.model.layers[0].self_attn.k_proj.weight)


def test_patterns_may_name_modules_of_a_multimodal_model_in_full(tmp_path):
    module, other = (f"model.language_model.layers.{i}.self_attn.q_proj" for i in range(2))
    tensors = factors({module: (8, 16), other: (8, 16)})
    adapter = LoraAdapter(write_adapter(tmp_path, tensors, alpha_pattern={module: 2}))
    scales = {name: change.scale for name, change in adapter.changes.items()}
    assert scales == {"model.layers.0.self_attn.q_proj": 1.0, "model.layers.1.self_attn.q_proj": 4.0}


def test_patterns_give_ranks_and_alphas(tmp_path):
    model, shapes = small_model(), linear_shapes(small_model())
    tensors = factors(shapes) | factors({Q: shapes[Q]}, rank=3)
    patterns = {"rank_pattern": {r"layers\.0\.self_attn\.q_proj": 3}, "alpha_pattern": {"down_proj": 10}}
    scales = {name: 5.0 if name.endswith("down_proj") else 4.0 for name in shapes} | {Q: 8 / 3}
    wanted = expected(model, tensors, scales)
    merge_lora(model, LoraAdapter(write_adapter(tmp_path, tensors, **patterns)))
    assert_equal(model, wanted)


def test_magnitudes_scale_rows(tmp_path):
    model, shapes = small_model(), linear_shapes(small_model())
    tensors = factors(shapes)
    tensors |= {f"{PREFIX}{name}.lora_magnitude_vector.weight": torch.rand(size[0]) for name, size in shapes.items()}
    wanted = expected(model, tensors, dict.fromkeys(shapes, 4.0))
    for name in shapes:
        rows, lengths = wanted[f"{name}.weight"], tensors[f"{PREFIX}{name}.lora_magnitude_vector.weight"].double()
        wanted[f"{name}.weight"] = rows / rows.norm(dim=1, keepdim=True) * lengths[:, None]
    merge_lora(model, LoraAdapter(write_adapter(tmp_path, tensors, use_dora=True)))
    assert_equal(model, wanted)


def test_tables_biases_and_whole_modules(tmp_path):
    model = small_model(attention_bias=True)
    wanted = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    a, b = torch.randn(2, 40), torch.randn(16, 2)
    head, norm, bias, extra = torch.randn(40, 16), torch.randn(16), torch.randn(16), torch.randn(16)
    tensors = factors({Q: (16, 16)}) | {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": a,
        f"{PREFIX}model.embed_tokens.lora_embedding_B": b,
        f"{PREFIX}model.embed_tokens.base_layer.weight": model.model.embed_tokens.weight.detach().clone(),
        f"{PREFIX}lm_head.weight": head,
        f"{PREFIX}model.norm.weight": norm,
        f"{PREFIX}{Q}.base_layer.bias": bias,
        f"{PREFIX}{Q}.lora_B.bias": extra,
    }
    factor_a, factor_b = (tensors[f"{PREFIX}{Q}.lora_{side}.weight"].double() for side in "AB")
    wanted[f"{Q}.weight"] = wanted[f"{Q}.weight"] + 4 * factor_b @ factor_a
    wanted["model.embed_tokens.weight"] = wanted["model.embed_tokens.weight"] + 4 * (b.double() @ a.double()).T
    wanted |= {"lm_head.weight": head.double(), "model.norm.weight": norm.double()}
    wanted[f"{Q}.bias"] = bias.double() + 4 * extra.double()
    config = {"target_modules": "exactly these", "lora_bias": True, "modules_to_save": ["lm_head", "norm"]}
    merge_lora(model, LoraAdapter(write_adapter(tmp_path, tensors, **config)))
    assert_equal(model, wanted)


def test_weights_that_are_stored_transposed(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=32))
    name = "transformer.h.0.attn.c_attn"
    tensors = factors({name: (48, 16)})
    before = model.get_submodule(name).weight.detach().double()
    a, b = (tensors[f"{PREFIX}{name}.lora_{side}.weight"].double() for side in "AB")
    folder = write_adapter(tmp_path, tensors, target_modules=["c_attn"], fan_in_fan_out=True)
    merge_lora(model, LoraAdapter(folder))
    wanted = before + 4 * (b @ a).T
    np.testing.assert_allclose(model.get_submodule(name).weight.detach(), wanted, rtol=2e-6, atol=2e-6)


def test_a_checkpoint_is_loaded_with_it(tmp_path):
    attention.register()
    model = small_model()
    model.save_pretrained(tmp_path / "base")
    tensors = factors(linear_shapes(model))
    adapter = open_lora(str(write_adapter(tmp_path / "lora", tensors)))
    assert_equal(
        load_model(tmp_path / "base", "checkpoint", adapter),
        expected(model, tensors, dict.fromkeys(linear_shapes(model), 4.0)),
    )


def test_memory_is_that_of_one_weight(tmp_path):
    model = small_model(hidden_size=256, intermediate_size=512, vocab_size=8, num_hidden_layers=6)
    adapter = LoraAdapter(write_adapter(tmp_path, factors(linear_shapes(model))))
    largest, whole = 256 * 512 * 4, sum(p.numel() for p in model.parameters()) * 4
    assert whole > 20 * largest
    tracemalloc.start()
    merge_lora(model, adapter)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest < peak < 3 * largest


def test_tables_of_speculators_are_the_merged_ones(tmp_path):
    model = small_model()
    model.save_pretrained(tmp_path / "base")
    tensors = factors({"lm_head": (40, 16)})
    write_adapter(tmp_path / "lora", tensors, target_modules=["lm_head"])
    job = GraphJob("target", str(tmp_path / "base"), lora=str(tmp_path / "lora"))
    dims = ModelDims("llama", 40, 16, 2, 2, 1, 8, 64)
    context = SourceContext("checkpoint", 32, 4, dims, job)
    tables = read_tables(context)
    wanted = expected(model, tensors, {"lm_head": 4.0})["lm_head.weight"]
    np.testing.assert_allclose(tables.lm_head, wanted, rtol=2e-6, atol=2e-6)
    assert torch.equal(tables.embeddings, model.model.embed_tokens.weight)
    digests = digests_of_adapter(job)
    assert set(digests) == {"lora/adapter_config.json", "lora/adapter_model.safetensors"}
    found = digests_from_target(context)
    assert {f"target/{name}": digest for name, digest in digests.items()}.items() <= found.items()


def _without(key: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(PREFIX + key)


def _with(key: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({key: torch.zeros(shape)})


CONFIGS = [
    ({"peft_type": "VERA"}, r"peft_type\): got 'VERA'; expected 'LORA'"),
    ({"peft_type": "IA3"}, "'IA3'.*merge_and_unload"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights.*'pissa'"),
    ({"layer_replication": [[0, 2]]}, r"layer_replication\)"),
    ({"alora_invocation_tokens": [3]}, r"alora_invocation_tokens\)"),
    ({"use_qalora": True}, r"use_qalora\)"),
    ({"r": 3}, r"A \[2, 24\].*expected A \[3, in\]"),
    ({"r": "two"}, "expected A"),
    ({"lora_alpha": "many"}, "alpha 'many'"),
    ({"rank_pattern": {"(": 2}}, "rank_pattern.*regular expressions"),
    ({"alpha_pattern": [1]}, "alpha_pattern.*an object"),
    ({"use_dora": True}, "no magnitudes with use_dora"),
    ({"target_modules": ["q_proj", "v_proj", "down_proj"]}, "none of model.layers.0.self_attn.v_proj"),
]
TENSORS = [
    (_without(f"{Q}.lora_A.weight"), "no lora_A.*both factors"),
    (_without(f"{Q}.lora_B.weight"), "no lora_B"),
    (_with(f"{PREFIX}{Q}.vera_lambda_b", 16), "unknown tensor.*LoRA or DoRA"),
    (_with(f"{PREFIX}{Q}.lora_B.other.weight", 16, 2), "unknown tensor"),
    (_with(f"{Q}.lora_A.weight", 2, 16), "names that begin with base_model.model."),
    (_with(f"{PREFIX}{Q}.lora_A.weight", 2, 24), r"shape \[16, 24\]; expected shape \[16, 16\].*'someone/base'"),
    (_with(f"{PREFIX}lm_head.weight", 41, 16), r"shape \[41, 16\]; expected shape \[40, 16\]"),
    (_with(f"{PREFIX}model.layers.7.norm.weight", 16), "no such part in the target"),
    (_with(f"{PREFIX}{DOWN}.lora_magnitude_vector", 16), "magnitudes with use_dora False"),
    (_with(f"{PREFIX}{DOWN}.lora_B.bias", 16), "a bias for a layer without one"),
    (lambda tensors: tensors[f"{PREFIX}{Q}.lora_A.weight"].fill_(math.nan), "not finite"),
    (lambda tensors: tensors.clear(), "no tensors"),
]


@pytest.mark.parametrize(
    ("config", "message"), CONFIGS, ids=[str(next(iter(c))) + str(i) for i, (c, _) in enumerate(CONFIGS)]
)
def test_configs_that_are_refused(config, message, tmp_path):
    model = small_model()
    write_adapter(tmp_path, factors(linear_shapes(model)), **config)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        merge_lora(model, LoraAdapter(tmp_path))


@pytest.mark.parametrize(("change", "message"), TENSORS, ids=[str(i) for i in range(len(TENSORS))])
def test_tensors_that_are_refused(change, message, tmp_path):
    model = small_model()
    tensors = factors(linear_shapes(model))
    change(tensors)
    write_adapter(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        merge_lora(model, LoraAdapter(tmp_path))


def test_tied_tables_are_refused(tmp_path):
    model = small_model(tie_word_embeddings=True)
    whole = {f"{PREFIX}model.embed_tokens.weight": torch.zeros(40, 16)}
    for name, tensors in (("factors", factors({"lm_head": (40, 16)})), ("whole", whole)):
        before = model.lm_head.weight.detach().clone()
        write_adapter(tmp_path / name, tensors, target_modules=["lm_head"])
        with pytest.raises(CheckpointError, match=r"a change of a table that is .* as well"):
            merge_lora(model, LoraAdapter(tmp_path / name))
        assert torch.equal(before, model.lm_head.weight)


def test_folders_without_an_adapter(tmp_path):
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json.*PEFT wrote"):
        LoraAdapter(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"a whole checkpoint.*target\.model"):
        LoraAdapter(tmp_path)
    write_adapter(tmp_path, {"x": torch.zeros(1)})
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin.*writes safetensors"):
        LoraAdapter(tmp_path)


PEFT_CASES: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "down_proj"]},
    {
        "target_modules": "all-linear",
        "use_rslora": True,
        "rank_pattern": {"o_proj": 5},
        "alpha_pattern": {"up_proj": 3},
    },
    {"target_modules": ["k_proj", "gate_proj"], "use_dora": True, "modules_to_save": ["lm_head"]},
    {"target_modules": ["v_proj", "embed_tokens"], "bias": "none"},
    {"target_modules": ["v_proj"], "bias": "all", "lora_bias": True},
]


@pytest.mark.parametrize("case", PEFT_CASES, ids=["plain", "patterns", "dora", "tables", "biases"])
def test_pefts_own_files_give_pefts_own_merge(case, tmp_path):
    peft = pytest.importorskip("peft", reason="needs the package peft, which the extra [dev] has")
    biases = {"attention_bias": True} if "lora_bias" in case else {}
    config = peft.LoraConfig(r=2, lora_alpha=8, task_type="CAUSAL_LM", **case)
    adapted = peft.get_peft_model(small_model(**biases), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                torch.manual_seed(len(name))
                parameter.add_(torch.rand_like(parameter))
    adapted.save_pretrained(tmp_path)
    model = small_model(**biases)
    merge_lora(model, LoraAdapter(tmp_path))
    wanted = {name: parameter.double() for name, parameter in adapted.merge_and_unload().state_dict().items()}
    assert_equal(model, wanted)
