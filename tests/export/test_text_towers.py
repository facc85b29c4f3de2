# SPDX-License-Identifier: Apache-2.0
"""The language model of a multimodal checkpoint exports as its twin without images does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from speccompile.checkpoints.checkpoint import check_checkpoint, read_dims, read_text_config, special_tokens
from speccompile.checkpoints.config_values import TOWERS, check_architecture, text_config
from speccompile.core.dims import ModelDims
from speccompile.errors import CheckpointError, ExportError
from tests.export.families import VOCAB
from tests.export.harness import Decoder, logits_after, logits_of
from tests.export.towers import make_tower, tower_config

MAX_SEQ_LEN = 24
MAX_ABS_DIFFERENCE = 2e-5  # of logits of order 1: float32 sums in another order
# Each has another prefix, another kind of language model, or both.
EXPORTED = ("gemma3", "llava", "mistral3", "muse_glimmer", "qwen2_5_vl", "qwen3_vl", "smolvlm")


def _edit(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _set(folder: Path, **changes: Any) -> None:
    """Changes config.json; None removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def _logits(graph: Any, dims: ModelDims, tokens: np.ndarray) -> np.ndarray:
    decoder = Decoder(graph, dims, batch=1, max_seq=MAX_SEQ_LEN)
    count = len(tokens)
    return decoder.step(tokens[None], np.arange(-1, count - 1)[None], np.arange(count)[None])["logits"][0]


def _folders(model_type: str, folder: Path) -> tuple[Any, Path, Path]:
    """Returns transformers' whole model, its folder, and that of the language model alone, written by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from speccompile.checkpoints.config_values import RENAMED
    from speccompile.checkpoints.model_config import read_model_config

    whole, alone = folder / "whole", folder / "alone"
    model = make_tower(tower_config(model_type), whole)
    loaded = AutoModelForCausalLM.from_pretrained(whole, config=read_model_config(whole), key_mapping=RENAMED)
    twin_model = AutoModelForCausalLM.from_config(read_model_config(whole), dtype=torch.float32)
    twin_model.load_state_dict(loaded.state_dict())
    twin_model.save_pretrained(alone)  # `loaded` would be saved under the names of the multimodal file
    return model, whole, alone


@pytest.mark.parametrize("model_type", EXPORTED)
def test_a_multimodal_folder_exports_as_its_language_model(model_type, tmp_path):
    """Its logits are those of the whole model; what is traced is what a folder of the language model alone gives."""
    import torch

    from speccompile.export import attention
    from speccompile.export.decoder import export_decoder
    from speccompile.export.weights import load_model

    model, whole, alone = _folders(model_type, tmp_path)
    graph, dims = export_decoder(whole, max_seq_len=MAX_SEQ_LEN)
    tokens = np.random.default_rng(0).integers(3, VOCAB, 9)
    logits = _logits(graph, dims, tokens)
    expected = logits_after(model, [tokens[: node + 1] for node in range(9)])
    assert np.abs(logits - expected).max() < MAX_ABS_DIFFERENCE

    attention.register()
    assert read_dims(whole) == read_dims(alone)
    loaded, twin = (load_model(folder, "checkpoint") for folder in (whole, alone))
    assert type(loaded) is type(twin) and _plain(loaded.config) == _plain(twin.config)
    weights, twin_weights = loaded.state_dict(), twin.state_dict()
    assert list(weights) == list(twin_weights)
    assert all(torch.equal(weight, twin_weights[name]) for name, weight in weights.items())
    if model_type == EXPORTED[0]:  # of all types it is the same graph, as the same is traced
        _assert_same_graph((graph, dims), export_decoder(alone, max_seq_len=MAX_SEQ_LEN))


def test_an_eps_that_the_tracer_takes_for_nothing_is_kept(tmp_path):
    """A text that begins with an embedding of zeros has finite logits."""
    import torch

    from speccompile.export.decoder import export_decoder

    model = make_tower(tower_config("muse_glimmer"), tmp_path)
    assert model.config.text_config.post_norm_eps == 1e-8
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
    model.save_pretrained(tmp_path)
    graph, dims = export_decoder(tmp_path, max_seq_len=MAX_SEQ_LEN)
    wanted = logits_of(model, np.array([0, 5]))
    assert np.abs(_logits(graph, dims, np.array([0, 5]))[1] - wanted).max() < MAX_ABS_DIFFERENCE


def _plain(config: Any) -> dict[str, Any]:
    """Returns a config without where it was read and which class and version wrote it."""
    own = {"_name_or_path", "architectures", "transformers_version"}
    return {key: value for key, value in config.to_dict().items() if key not in own}


def _assert_same_graph(graph: Any, twin: Any) -> None:
    """Names and weights in their order, and the bits of the logits."""
    assert graph[1] == twin[1] and graph[1].num_params == twin[1].num_params
    weights, others = ({k: v.const_value.numpy() for k, v in g.graph.initializers.items()} for g, _ in (graph, twin))
    assert list(weights) == list(others)
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, others[name])
    tokens = np.random.default_rng(0).integers(3, VOCAB, 9)
    np.testing.assert_array_equal(_logits(*graph, tokens), _logits(*twin, tokens))


@pytest.mark.parametrize("model_type", sorted(TOWERS))
def test_the_language_model_has_equal_logits_alone(model_type, tmp_path):
    from transformers import AutoModelForCausalLM

    from speccompile.checkpoints.config_values import RENAMED
    from speccompile.checkpoints.model_config import read_model_config

    model = make_tower(tower_config(model_type), tmp_path)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path, config=read_model_config(tmp_path), key_mapping=RENAMED)
    tokens = np.random.default_rng(0).integers(3, VOCAB, 11)
    np.testing.assert_allclose(logits_of(alone, tokens), logits_of(model, tokens), atol=MAX_ABS_DIFFERENCE, rtol=0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    make_tower(tower_config("gemma3"), folder)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


_LAYER = "language_model.model.layers.1"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{_LAYER}.self_attn.q_norm.weight"), "layer 1 without self_attn.q_norm.weight"),
        (lambda t: t.pop(f"{_LAYER}.mlp.up_proj.weight"), "1 missing weights .model.layers.1.mlp.up_proj.weight"),
        (lambda t: [t.pop(k) for k in list(t) if k.startswith(_LAYER)], "no weights of layer 1"),
        (lambda t: t.update({f"{_LAYER}.mlp.extra.weight": np.ones(3, np.float32)}), "architecture does not have"),
        (lambda t: t.update({"other.weight": np.ones(3, np.float32)}), "architecture does not have"),
        (
            lambda t: t.update({f"{_LAYER}.mlp.up_proj.weight": np.ones((3, 32), np.float32)}),
            "1 weights of another shape",
        ),
    ],
)
def test_a_wrong_weight_of_the_language_model_is_refused(copy, change, words):
    from speccompile.export.decoder import export_decoder

    _edit(copy, change)
    with pytest.raises(CheckpointError, match=words):
        export_decoder(copy, max_seq_len=16)


def test_weights_of_images_and_draft_heads_are_not_read(copy):
    from speccompile.export import attention
    from speccompile.export.weights import load_model

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors.pop(next(name for name in tensors if name.startswith("vision_tower.")))
        tensors["mtp.layers.0.self_attn.q_proj.weight"] = np.ones((2, 2), np.float32)
        tensors["vision_tower.encoder.layers.7.norm.weight"] = np.ones(2, np.float32)

    _edit(copy, change)
    check_checkpoint(copy, read_dims(copy))
    attention.register()
    assert not [name for name, _ in load_model(copy, "checkpoint").named_parameters() if "vision" in name]


def test_sizes_come_from_the_language_model(copy):
    assert read_dims(copy) == ModelDims("gemma3_text", VOCAB, 32, 2, 4, 2, 8, 64)
    text = json.loads((copy / "config.json").read_text())["text_config"]
    # The released files leave these to the class.
    _set(
        copy, text_config={k: v for k, v in text.items() if k not in ("vocab_size", "num_attention_heads", "head_dim")}
    )
    dims = read_dims(copy)
    assert (dims.vocab_size, dims.num_heads, dims.head_dim) == (262208, 8, 256)


def test_the_defaults_are_those_of_transformers():
    from transformers import CONFIG_MAPPING

    from speccompile.checkpoints.config_values import _DEFAULTS

    for model_type, sizes in _DEFAULTS.items():
        config = CONFIG_MAPPING[model_type]()
        config.allow_global_per_layer_attribute_access = True  # head_dim of layers with two widths
        assert {name: getattr(config, name) for name in sizes} == sizes


def test_the_top_level_says_whether_embeddings_are_tied(copy):
    from speccompile.checkpoints.model_config import read_model_config

    text = json.loads((copy / "config.json").read_text())["text_config"]
    for is_tied in (True, False):
        _set(copy, tie_word_embeddings=is_tied, text_config={**text, "tie_word_embeddings": not is_tied})
        assert read_text_config(copy)["tie_word_embeddings"] is is_tied
        assert read_model_config(copy).tie_word_embeddings is is_tied


def test_special_tokens_of_either_level(copy):
    (copy / "generation_config.json").unlink(missing_ok=True)
    text = json.loads((copy / "config.json").read_text())["text_config"]
    _set(copy, eos_token_id=None, bos_token_id=None, text_config={**text, "eos_token_id": 5, "bos_token_id": 4})
    assert special_tokens(copy) == ([5], 4)
    _set(copy, eos_token_id=[7, 8])
    assert special_tokens(copy) == ([7, 8], 4)


def test_an_older_flat_config(tmp_path):
    from speccompile.export.decoder import export_decoder

    model = make_tower(tower_config("qwen2_5_vl"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = {k: v for k, v in config["text_config"].items() if k not in ("model_type", "rope_parameters", "layer_types")}
    rope = {"type": "mrope", "mrope_section": [2, 1, 1]}
    flat = {**config, **text, "text_config": None, "rope_scaling": rope, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in flat.items() if v is not None}))
    graph, dims = export_decoder(tmp_path, max_seq_len=MAX_SEQ_LEN)
    assert dims.model_type == "qwen2"
    tokens = np.random.default_rng(0).integers(3, VOCAB, 7)
    assert np.abs(_logits(graph, dims, tokens)[-1] - logits_of(model, tokens)).max() < MAX_ABS_DIFFERENCE


def test_what_the_language_model_is_refused_for():
    text = {"model_type": "gemma3_text", "vocab_size": 8}
    check_architecture({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    for changes, words in (({"kv_lora_rank": 4}, "latent attention"), ({"model_type": "mamba"}, "recurrent layers")):
        with pytest.raises(ExportError, match=words):
            check_architecture({"model_type": "gemma3", "text_config": {**text, **changes}})
    quantised = {"quantization_config": {"quant_method": "bitsandbytes"}}
    with pytest.raises(ExportError, match="quantised by bitsandbytes"):
        check_architecture({"model_type": "gemma3", "text_config": text, **quantised})


def test_a_flat_config_stays_as_it_is():
    config = {"model_type": "llama", "vocab_size": 8, "rope_scaling": {"type": "mrope"}}
    assert text_config(config) == config
