# SPDX-License-Identifier: Apache-2.0
"""gpt-oss checkpoints whose experts are in MXFP4: every value of the files is the graph's, and logits are equal."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from speccompile.errors import CheckpointError
from speccompile.export.decoder import export_decoder
from tests.export.families import CONFIGS
from tests.export.harness import Decoder, chain_parents, logits_of, lowered, make_checkpoint

CONFIG = {**CONFIGS["gpt-oss"], "hidden_size": 64, "intermediate_size": 32}
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1 without its sign, which is bit 3
EXPERTS = ("gate_up_proj", "down_proj")


def values_of(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[experts, out, groups, 16] codes, two a byte with the first in the low half, times 2^(scale - 127), float64."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], -1)
    numbers = np.array([*VALUES, *(-v for v in VALUES)])[codes]
    return np.ldexp(numbers, scales[..., None].astype(np.int64) - 127).reshape(*blocks.shape[:2], -1)


def pack_experts(folder: Path) -> dict[str, np.ndarray]:
    """Replace the experts of a checkpoint by random MXFP4; returns their values [experts, in, out] by name."""
    rng, path = np.random.default_rng(0), folder / "model.safetensors"
    tensors, values = load_file(path), {}
    for name in [n for n in tensors if n.endswith(EXPERTS)]:
        experts, num_in, num_out = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, num_out, num_in // 32, 16), dtype=np.uint8)
        scales = rng.integers(118, 128, (experts, num_out, num_in // 32), dtype=np.uint8)
        tensors |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
        values[name] = values_of(blocks, scales).transpose(0, 2, 1)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return values


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with MXFP4 experts, and transformers' model with their values in float32."""
    folder = tmp_path_factory.mktemp("mxfp4")
    model = make_checkpoint(CONFIG, folder)
    values, held = pack_experts(folder), dict(model.named_parameters())
    assert len(values) == len(EXPERTS) * CONFIG["num_hidden_layers"]
    with torch.no_grad():
        for name, array in values.items():
            wide = torch.from_numpy(array.copy())
            held[name].copy_(wide)
            assert torch.equal(held[name].double(), wide), "float32 holds every value"
    return folder, model


def test_every_value_survives_and_logits_are_equal(checkpoint):
    folder, model = checkpoint
    graph, dims = export_decoder(folder, max_seq_len=16)
    for name, parameter in model.named_parameters():
        if name.endswith(EXPERTS):
            stored = [v.const_value for n, v in graph.graph.initializers.items() if n.startswith(name)]
            stored = [t.numpy() for t in stored if t is not None and t.numpy().size == parameter.numel()]
            assert stored, name
            wanted = parameter.detach().numpy()
            assert all(np.array_equal(a, wanted) or np.array_equal(a, wanted.transpose(0, 2, 1)) for a in stored)
    decoder = Decoder(lowered(graph), dims, batch=1, max_seq=16)
    tokens = np.random.default_rng(1).integers(3, CONFIG["vocab_size"], (1, 9))
    logits = decoder.step(tokens, np.array([chain_parents(9, 9)]), np.arange(9)[None])["logits"]
    for node in range(9):
        expected = logits_of(model, tokens[0, : node + 1])
        assert np.abs(logits[0, node] - expected).max() < 1e-4 * np.abs(expected).max()


def test_missing_scales_are_refused(checkpoint, tmp_path):
    folder, _ = checkpoint
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match="down_proj"):
        export_decoder(tmp_path, max_seq_len=16)
