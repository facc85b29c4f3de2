# SPDX-License-Identifier: Apache-2.0
"""What each layer of a model with Mamba 2 layers or short convolutions keeps, from published forms of configs."""

import json
from pathlib import Path
from typing import Any

import pytest

from speccompile.checkpoints.checkpoint import read_dims, read_text_config
from speccompile.checkpoints.config_values import check_config
from speccompile.core.dims import LayerDims, RecurrentDims
from speccompile.core.specs import CONV_ROWS
from speccompile.errors import CheckpointError, ExportError
from speccompile.graph_kinds.decoder import decoder_spec
from speccompile.recipe.predict import predict

pytestmark = pytest.mark.export

_COMMON = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "intermediate_size": 48,
}  # fmt: skip
_BAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_head": "auto"}
MIXER = RecurrentDims(2, 8, 16, 8, 64 + 2 * 2 * 16, 4)
ATTENTION, M, NOTHING = LayerDims(2, 8), LayerDims(recurrent=MIXER), LayerDims()
PATTERN = "M-*E"
_NEMOTRON = {
    "hybrid_override_pattern": PATTERN, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16,
    "head_dim": 8,
}  # fmt: skip
_ZAMBA = {"n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 16, "kv_channels": 8}
CONV = LayerDims(recurrent=RecurrentDims(0, 0, 0, 0, 32, 3))
# Of a config: its type, its own fields, what each layer keeps.
CONFIGS: dict[str, tuple[str, dict[str, Any], tuple[LayerDims, ...]]] = {
    "granite": ("granitemoehybrid", {**_BAMBA, "layer_types": ["mamba", "attention"] * 2}, (M, ATTENTION) * 2),
    "granite without attention": ("granitemoehybrid", _BAMBA, (M,) * 4),
    "bamba": ("bamba", {**_BAMBA, "attn_layer_indices": [2]}, (M, M, ATTENTION, M)),
    "nemotron": ("nemotron_h", _NEMOTRON, (M, NOTHING, ATTENTION, NOTHING)),
    "nemotron as it is saved": (
        "nemotron_h",
        {**_NEMOTRON, "num_hidden_layers": None, "layers_block_type": ["mamba", "mlp", "full_attention", "moe"]},
        (M, NOTHING, ATTENTION, NOTHING),
    ),
    "falcon": ("falcon_h1", {**_BAMBA, "mamba_d_ssm": 64}, (LayerDims(2, 8, MIXER),) * 4),
    "zamba": (
        "zamba2", {**_ZAMBA, "layers_block_type": ["mamba", "hybrid"] * 2}, (M, LayerDims(2, 16, MIXER)) * 2
    ),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16}, (M,) * 4),
    "lfm2": ("lfm2", {"full_attn_idxs": [1]}, (CONV, ATTENTION, CONV, CONV)),
    "lfm2 of attention alone": ("lfm2", {}, (ATTENTION,) * 4),
}  # fmt: skip


def _write(folder: Path, model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    config = {**_COMMON, "model_type": model_type, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_what_each_layer_keeps(name, tmp_path):
    model_type, fields, expected = CONFIGS[name]
    check_config(_write(tmp_path, model_type, fields), max_seq_len=64)
    assert read_dims(tmp_path).per_layer == expected


def test_nemotrons_number_of_layers_is_that_of_their_kinds(tmp_path):
    _write(tmp_path, "nemotron_h", {**_NEMOTRON, "num_hidden_layers": 9})
    assert read_dims(tmp_path).num_layers == len(PATTERN)
    assert "hybrid_override_pattern" not in read_text_config(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "fields", "words"),
    [
        ("granitemoehybrid", {**_BAMBA, "mamba_n_heads": 0}, r"mamba_n_heads\): got 0; expected a positive integer"),
        ("granitemoehybrid", {**_BAMBA, "mamba_n_heads": 7}, "got 64; expected a multiple of the 7 heads"),
        ("granitemoehybrid", {**_BAMBA, "mamba_expand": "x"}, "got None; expected a multiple of the 8 heads"),
        ("bamba", {**_BAMBA, "mamba_n_groups": 3}, "got 3 groups with 8 heads; expected a divisor"),
        ("bamba", {**_BAMBA, "mamba_d_state": -1}, "mamba_d_state"),
        ("granitemoehybrid", {**_BAMBA, "layer_types": ["mamba"]}, r"layer_types\): got 1 kinds; expected a list of 4"),
        ("nemotron_h", {**_NEMOTRON, "hybrid_override_pattern": "MX"}, "got .*'X'"),
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache"),
    ],
)
def test_sizes_that_cannot_be(model_type, fields, words, tmp_path):
    _write(tmp_path, model_type, fields)
    with pytest.raises(CheckpointError, match=words):
        read_dims(tmp_path)


def test_other_kinds_of_layers_are_refused():
    with pytest.raises(ExportError, match="layers of the kind X"):
        check_config({**_COMMON, **_NEMOTRON, "model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, 64)


def test_a_layer_may_keep_rows_of_a_convolution_alone(tmp_path):
    config = _write(tmp_path, "lfm2", {"full_attn_idxs": [1]})
    dims = read_dims(tmp_path)
    spec = decoder_spec("target", dims, max_pending=5)
    assert spec.states == ("conv_rows.0", "conv_rows.2", "conv_rows.3")
    assert spec.input("conv_rows.2").dims == ("batch", CONV_ROWS, 32)
    assert spec.state_shapes(3)["conv_rows.0"] == (3, 2 + 5, 32)
    assert dims.state_bytes(5) == 3 * 4 * 7 * 32
    # Products of the input and of the output, and three columns of taps.
    attention = {**config, "full_attn_idxs": [0, 1, 2, 3]}
    (tmp_path / "config.json").write_text(json.dumps(attention))
    plain = predict(attention, read_dims(tmp_path), "none", slots=1, rows=64).num_params
    got = predict(config, dims, "none", slots=1, rows=64).num_params
    assert got - plain == 3 * (4 * 32 * 32 + 3 * 32 - 2 * 32 * (4 + 2) * 8)


def test_a_layer_may_have_attention_beside_a_mixer(tmp_path):
    model_type, fields, _ = CONFIGS["falcon"]
    config = _write(tmp_path, model_type, fields)
    dims = read_dims(tmp_path)
    assert dims.attention_layers == dims.recurrent_layers == (0, 1, 2, 3)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "bamba"}))
    mixers = predict(config, read_dims(tmp_path), "none", slots=1, rows=64).num_params
    both = predict(config, dims, "none", slots=1, rows=64).num_params
    assert both - mixers == 4 * 2 * 32 * (4 + 2) * 8
