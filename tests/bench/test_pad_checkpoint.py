# SPDX-License-Identifier: Apache-2.0
"""Padding changes the cost of a checkpoint and nothing else."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "examples/models/pycode-16m-draft"


@pytest.fixture(scope="module")
def pad():
    spec = importlib.util.spec_from_file_location("pad_checkpoint", ROOT / "bench/pad_checkpoint.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def padded(pad, tmp_path_factory):
    dest = tmp_path_factory.mktemp("padded") / "model"
    pad.main([str(SOURCE), str(dest), "--params", "4e6"])
    return dest


def test_logits_are_unchanged(padded):
    tokens = torch.randint(3, 8192, (2, 17), generator=torch.Generator().manual_seed(0))
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)(tokens).logits for path in (SOURCE, padded)
    )
    # Sums of the same terms and zeros in another blocking: float64 leaves rounding only.
    assert (before - after).abs().max().item() < 1e-10
    assert before.abs().max().item() > 1.0


def test_the_size_is_what_was_asked_and_what_the_config_says(padded):
    config = json.loads((padded / "config.json").read_text())
    source = json.loads((SOURCE / "config.json").read_text())
    neuron = 3 * source["hidden_size"] * source["num_hidden_layers"]
    num_params = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(padded).parameters())
    assert 4e6 - 64 * neuron < num_params <= 4e6
    assert config["intermediate_size"] % 64 == 0
    assert {key for key in config if config[key] != source.get(key)} == {"intermediate_size"}
    assert (padded / "tokenizer.json").read_bytes() == (SOURCE / "tokenizer.json").read_bytes()


def test_float32_weights_need_float32_and_compute_nearly_the_same(pad, tmp_path):
    pad.main([str(SOURCE), str(tmp_path / "wide"), "--float32"])
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (SOURCE, tmp_path / "wide")
    )
    for name, weight in after.named_parameters():
        is_bfloat16 = torch.equal(weight, weight.to(torch.bfloat16).double())
        assert torch.equal(weight, weight.float().double()) and is_bfloat16 == (weight.ndim != 2), name
    tokens = torch.randint(3, 8192, (1, 17), generator=torch.Generator().manual_seed(0))
    probs, near = (model(tokens).logits.softmax(-1) for model in (before, after))
    assert 0 < (probs * (probs / near).log()).sum(-1).mean().item() < 1e-5
    assert json.loads((tmp_path / "wide/config.json").read_text())["dtype"] == "float32"


def test_nothing_to_do_is_refused(pad, tmp_path):
    with pytest.raises(SystemExit):
        pad.main([str(SOURCE), str(tmp_path / "dest")])


def test_padding_down_is_refused_before_anything_is_written(pad, tmp_path):
    with pytest.raises(SystemExit, match=r"--params 1000: the model has .* already; ask for .* or more"):
        pad.main([str(SOURCE), str(tmp_path / "dest"), "--params", "1000"])
    assert not (tmp_path / "dest").exists()


def test_a_folder_without_weights_is_refused(pad, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"holds no \*.safetensors file"):
        pad.main([str(tmp_path), str(tmp_path / "dest"), "--params", "1e6"])


def test_a_module_of_a_hybrid_grows_along_and_does_not_count(pad, tmp_path):
    source, dest = ROOT / "examples/models/pycode-hybrid", tmp_path / "hybrid"
    assert pad.pad_checkpoint(source, dest, 2e7)[0] < pad.pad_checkpoint(source, tmp_path / "same", 2.1e7)[1] <= 2.1e7
    config, tensors = json.loads((dest / "config.json").read_text()), pad.read_tensors(dest)
    inner = config["intermediate_size"]
    widths = {name: max(tensor.shape) for name, tensor in tensors.items() if "_proj.weight" in name and ".mlp." in name}
    assert set(widths.values()) == {inner} and len(widths) == 3 * (config["num_hidden_layers"] + 1)
    assert 2e7 - 64 * 3 * 384 * 8 < sum(t.numel() for name, t in tensors.items() if not name.startswith("mtp.")) <= 2e7
    tokens = torch.randint(3, 8192, (1, 9), generator=torch.Generator().manual_seed(0))
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits for path in (source, dest)
    )
    assert (before - after).abs().max().item() < 1e-4 * before.abs().max().item()
