# SPDX-License-Identifier: Apache-2.0
"""Unsupported architectures are refused by name, never exported wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from speccompile.checkpoints.config_values import check_config
from speccompile.errors import ExportError
from tests.export.families import CONFIGS

_LLAMA = CONFIGS["llama2"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mpt"}, "ALiBi"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "xlnet"}, "does not go through"),
        ({"model_type": "mamba"}, "recurrent layers"),
        ({"model_type": "jamba"}, "linear-attention"),
        ({"model_type": "qwen4_exp"}, "linear-attention"),
        ({"model_type": "longcat_flash"}, "latent attention"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder"),
        (
            {"model_type": "llama4_text", "layer_types": ["chunked_attention"], "attention_chunk_size": 64},
            "max_seq_len 65 with chunked attention",
        ),
        ({"text_config": {"vocab_size": 8}}, "a multimodal checkpoint"),
        ({"vision_config": {}}, "a multimodal checkpoint"),
        ({"kv_lora_rank": 16}, "latent attention"),
        ({"alibi": True}, "ALiBi"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "'dynamic'"),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
            "max_seq_len 65 with rope type longrope",
        ),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 64}, "which is 64"),
    ],
)
def test_configs_that_are_refused(changes, words):
    with pytest.raises(ExportError, match=words) as caught:
        check_config({**_LLAMA, **changes}, max_seq_len=65)
    fault = caught.value
    assert fault.where == changes.get("model_type", "llama")
    assert fault.got and fault.expected and fault.todo.endswith(".")


def test_angles_that_hunyuan_stretches_once_are_not_refused():
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    check_config({**_LLAMA, "model_type": "hunyuan_v1_dense", "rope_scaling": rope}, max_seq_len=64)
    with pytest.raises(ExportError, match="'dynamic'"):
        check_config({**_LLAMA, "rope_scaling": rope}, max_seq_len=64)


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_are_not(name):
    check_config(CONFIGS[name], max_seq_len=64)


def _export(config: dict[str, Any], folder: Path, max_seq_len: int = 16, **options: Any) -> None:
    from speccompile.export.decoder import export_decoder

    (folder / "config.json").write_text(json.dumps(config))
    export_decoder(folder, weights="random", max_seq_len=max_seq_len, **options)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_cache_longer_than_the_table_of_positions(name, tmp_path):
    with pytest.raises(ExportError, match=r"max_seq_len 65; expected at most 64, the length of its table") as caught:
        _export(CONFIGS[name], tmp_path, max_seq_len=65)
    assert "engine.max_seq_len" in caught.value.todo


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 32}, "0 cached attentions"),
        (
            {"model_type": "gptj", "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, "rotary_dim": 4},
            "attention that does not go through transformers' attention interface",
        ),
    ],
    ids=["no registry of attentions", "a table of attentions of its own"],
)  # fmt: skip
def test_models_are_refused_even_where_no_name_is_known(config, words, tmp_path, monkeypatch):
    monkeypatch.setattr("speccompile.checkpoints.config_values._REFUSED", {})
    monkeypatch.setattr("speccompile.export.adapted_models.ADAPTERS", {})
    with pytest.raises(ExportError, match=words):
        _export({**_LLAMA, "max_position_embeddings": 64, **config}, tmp_path)


def test_an_attention_that_computes_something_else_is_found(tmp_path, monkeypatch):
    from speccompile.export import attention

    honest = attention.attend

    def scaled(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return honest(module, query * 1.5, *args, **kwargs)

    monkeypatch.setattr(attention, "attend", scaled)
    # Weights large enough that attention changes the logits.
    with pytest.raises(ExportError, match=r"logits that differ by .* from transformers' own"):
        _export({**_LLAMA, "initializer_range": 0.3}, tmp_path)
    monkeypatch.undo()
    attention.register()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"s_aux": 1, "softcap": 1.0}, "a softcap beside attention sinks"),
        ({"position_bias": 1}, "`position_bias`"),
        ({"something_new": 1}, "`something_new`"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": 1}, "attention mask"),
    ],
)
def test_arguments_of_an_attention_layer(kwargs, words):
    import torch

    from speccompile.export.attention import Frame, attend, forward_pass

    module = torch.nn.Module()
    module.layer_idx = 0
    q, k = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 2, 8)
    mask = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    frame = Frame(
        torch.zeros(1, dtype=torch.int64),
        mask,
        torch.zeros(1, 1, dtype=torch.int64),
        {0: (torch.zeros(1, 2, 4, 8),) * 2},
    )
    given = {"attention_mask": None, **kwargs}
    with forward_pass(frame), pytest.raises(ExportError, match=words) as caught:
        attend(module, q, k, k, given.pop("attention_mask"), **given)
    assert caught.value.where == "Module (layer 0)"
    with forward_pass(frame):
        out, _ = attend(module, q, k, k, None, dropout=0.0, position_ids=1, unknown_but_none=None)
        assert out.shape == (1, 2, 4, 8)
    with forward_pass(frame), pytest.raises(ExportError, match="used twice"):
        attend(module, q, k, k, None)


def test_heads_that_do_not_fit_the_cache():
    import torch

    from speccompile.export.attention import Frame, attend, forward_pass

    module = torch.nn.Module()
    module.layer_idx = 0
    q, k, v = torch.zeros(1, 4, 2, 12), torch.zeros(1, 4, 2, 12), torch.zeros(1, 4, 2, 16)
    frame = Frame(torch.zeros(1), torch.ones(1, 2, 2), torch.zeros(1, 1), {0: (torch.zeros(1, 4, 4, 12),) * 2})
    with forward_pass(frame), pytest.raises(ExportError, match="value heads of 4 x 16 and query heads of width 12"):
        attend(module, q, k, v, None)


@pytest.mark.parametrize("layers", [(2,), (-1,), (0, 0)])
def test_hidden_layers_that_are_not_there(layers, tmp_path):
    with pytest.raises(ExportError, match=r"hidden_layers: got .*; expected different layers between 0 and 1"):
        _export(_LLAMA, tmp_path, hidden_layers=layers)


def test_sizes_that_are_not_in_the_config(tmp_path):
    """OPT may project its hidden state before the LM head reads it."""
    with pytest.raises(ExportError, match=r"hidden: got dims \['batch', 'nodes', 16\] in the trace"):
        _export({**CONFIGS["opt"], "word_embed_proj_dim": 16}, tmp_path, hidden=True)


def test_an_architecture_that_brings_its_own_code(tmp_path):
    config = {**_LLAMA, "model_type": "own_model", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "own.py").write_text("raise SystemExit('executed')")
    with pytest.raises(ExportError, match="a causal language model that transformers builds"):
        _export(config, tmp_path)


def test_an_unknown_architecture(tmp_path):
    with pytest.raises(ExportError, match="a causal language model that transformers builds"):
        _export({**_LLAMA, "model_type": "no_such_model"}, tmp_path)
