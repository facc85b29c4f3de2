# SPDX-License-Identifier: Apache-2.0
"""Conversions keep every number, write what others load, and leave no file when they refuse."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from speccompile.cli.main import main
from speccompile.doctor.doctor import examine, read_speculator
from tests.checkpoints import checkpoint_lab as lab
from tests.export.eagle3_reference import target_logits

PAIRS = [
    ("medusa-release", "ours"), ("medusa-pickle", "ours"), ("medusa-hf", "ours"), ("medusa-modelopt", "vllm"),
    ("medusa-vllm", "ours"), ("medusa", "hf"), ("medusa", "modelopt"), ("mlp", "ours"), ("mlp-tied", "ours"),
    ("mlp-first-copies", "ours"), ("eagle-two-layers", "ours"), ("eagle-pickle", "ours"), ("eagle3", "speculators"),
    ("eagle3-specforge", "speculators"), ("eagle3-whole", "speculators"), ("eagle3-numbered", "ours"),
    ("eagle3-speculators", "ours"), ("eagle3-speculators", "numbered"), ("glide", "ours"), ("glide-tied", "ours"),
    ("mlp-square", "ours"), ("mlp-old-name", "ours"), ("eagle3-normed", "speculators"),
    ("eagle3-deepspec", "ours"), ("eagle3-wrapped", "ours"), ("peagle-qwen", "ours"),
    ("eagle3-narrow", "speculators"), ("eagle3-windowed", "speculators"), ("peagle", "speculators"),
    ("peagle-numbered", "ours"),
    ("eagle3-low-rank", "ours"), ("peagle-speculators", "numbered"), ("dflash", "speculators"),
    ("dflash-two", "speculators"), ("dflash-spark", "ours"), ("dflash-lilicorr", "ours"),
    ("dflash-lilicorr-wide", "ours"), ("dflash-domino", "ours"), ("dflash-domino-first", "ours"),
    ("dflash-speculators", "ours"), ("mtp", "ours"),
    ("mtp", "speculators"), ("mtp-speculators", "ours"), ("mtp-qwen", "ours"), ("mtp-glm", "ours"),
    ("medusa-vllm-cut", "ours"), ("medusa-vllm-cut", "vllm"), ("medusa-vllm-shared", "ours"),
    ("medusa-vllm-shared", "vllm"), ("eagle-vllm", "ours"), ("eagle-vllm-cut", "ours"), ("eagle-speculators", "ours"),
    ("eagle3-nvidia", "speculators"),
    ("prophet", "ours"), ("prophet-small", "ours"), ("prophet-tied", "ours"),
]  # fmt: skip


def read_ours(method: str, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return read_speculator(folder, importlib.import_module(f"speccompile.speculators.{method}.checkpoint").FORMATS)


def run(*words: object) -> int:
    """The command's exit code."""
    return main([str(w) for w in words])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return lab.write_target(tmp_path / "target")


@pytest.mark.parametrize(("name", "to"), PAIRS)
def test_nothing_is_lost_on_the_way(name, to, tmp_path, target):
    make, layout = lab.LAYOUTS[name]
    method = layout.partition("/")[0]
    source, dest = make(tmp_path / "source"), tmp_path / "dest"
    assert run("convert", source, "--to", to, "--target", target, "-o", dest) == 0
    report = examine(str(dest), str(target))
    assert report.findings == () and report.format == f"{method}/{to}"
    (config, before), (again, after) = read_ours(method, source), read_ours(method, dest)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    named = {"base_model_name_or_path"}
    assert {k: v for k, v in config.items() if k not in named} == {k: v for k, v in again.items() if k not in named}
    assert sorted(p.name for p in dest.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("to", ["numbered", "speculators"])
def test_a_head_of_two_products_stays_in_our_layout(to, tmp_path, target, capsys):
    """Others would read the second product as the whole head."""
    source, dest = lab.eagle3_low_rank(tmp_path / "source"), tmp_path / "dest"
    assert run("convert", source, "--to", to, "--target", target, "-o", dest) != 0
    assert "lm_head" in capsys.readouterr().err and not dest.exists()


def test_what_is_written_is_what_safetensors_writes(tmp_path):
    source, dest = lab.eagle3_ours(tmp_path / "source"), tmp_path / "dest"
    assert run("convert", source, "-o", dest) == 0
    with safe_open(dest / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    held, made = load_file(source / "model.safetensors"), load_file(dest / "model.safetensors")
    assert held.keys() == made.keys() and all(torch.equal(held[k], made[k]) for k in held)


@pytest.mark.parametrize("before_residual", [False, True])
@pytest.mark.parametrize("make", [lab.eagle3_ours, lab.eagle3_whole])
def test_logits_are_equal_after_a_round_trip_through_the_speculators_format(make, before_residual, tmp_path, target):
    source, other, back = make(tmp_path / "a"), tmp_path / "b", tmp_path / "c"
    lab.set_config(source, norm_before_residual=before_residual)
    assert run("convert", source, "--to", "speculators", "--target", target, "-o", other) == 0
    assert run("convert", other, "--to", "ours", "-o", back) == 0
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(lab.VOCAB, (9,), generator=generator)
    states = torch.randn((9, 3 * lab.HIDDEN), generator=generator)
    logits = []
    for folder, layer in ((source, "midlayer"), (other, "layers.0"), (back, "midlayer")):
        config = json.loads((folder / "config.json").read_text())
        flat = {
            **config.get("transformer_layer_config", config),
            "norm_before_residual": config["norm_before_residual"],
        }
        logits.append(target_logits(flat, load_file(folder / "model.safetensors"), layer, tokens, states))
    assert torch.isfinite(logits[0]).sum() == 9 * (lab.DRAFT_VOCAB if make is lab.eagle3_ours else lab.VOCAB)
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    # The switch that both configs carry matters.
    flat["norm_before_residual"] = not before_residual
    held = load_file(back / "model.safetensors")
    assert not torch.equal(target_logits(flat, held, "midlayer", tokens, states), logits[2])


def test_the_speculators_config_has_what_vllm_reads(tmp_path, target):
    source, dest = lab.eagle3_specforge(tmp_path / "source"), tmp_path / "dest"
    assert run("convert", source, "--to", "speculators", "--target", target, "-o", dest) == 0
    config = json.loads((dest / "config.json").read_text())
    nested = config["speculators_config"]
    assert config["speculators_model_type"] == nested["algorithm"] == "eagle3"
    (method,) = nested["proposal_methods"]
    assert method["proposal_type"] == nested["default_proposal_method"] and method["speculative_tokens"] > 0
    assert nested["verifier"] == {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    assert config["norm_before_residual"] is False  # vLLM would take true where it is left out
    assert config["draft_vocab_size"] == lab.DRAFT_VOCAB and config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"]) == ("llama", 1)
    assert (layer["hidden_size"], layer["vocab_size"], layer["head_dim"]) == (lab.HIDDEN, lab.VOCAB, lab.HEAD_DIM)
    keys = load_file(dest / "model.safetensors").keys()
    assert "layers.0.hidden_norm.weight" in keys and {"d2t", "t2d", "fc.weight", "norm.weight"} <= keys


def test_a_mask_is_made_where_only_the_map_is_stored(tmp_path):
    folder = lab.eagle3_ours(tmp_path)
    lab.edit(folder, lambda held: held.pop("t2d"))
    assert read_ours("eagle3", folder)[1]["t2d"].nonzero().flatten().tolist() == lab.KEPT


def test_shared_weights_are_one_tensor(tmp_path):
    first, all_copies = lab.mlp_first_copies(tmp_path / "a"), lab.mlp_tied(tmp_path / "b")
    for folder in (first, all_copies):
        _, held = read_ours("mlp", folder)
        assert len(held) == 15
        assert torch.equal(held["emb.2.weight"], held["emb.0.weight"])
        assert torch.equal(held["proj.2.weight"], held["proj.1.weight"]) and held["proj.0.weight"].shape == (24, 16)
    assert run("convert", all_copies, "-o", tmp_path / "c") == 0
    assert sorted(load_file(tmp_path / "c" / "model.safetensors")) == sorted(load_file(first / "model.safetensors"))


def test_heads_without_biases_get_zeros(tmp_path):
    _, held = read_ours("medusa", lab.medusa_vllm(tmp_path))
    assert held["2.0.linear.bias"].shape == (lab.HIDDEN,) and not held["2.0.linear.bias"].any()


def test_repeated_blocks_are_written_as_they_act(tmp_path):
    held = lab.medusa_tensors(num_layers=2)
    kept = {k: t for k, t in held.items() if ".1.linear." not in k}
    source = lab.save(tmp_path / "a", {**lab.MEDUSA, "medusa_num_layers": 2}, kept)
    assert run("convert", source, "-o", tmp_path / "b") == 0
    made = load_file(tmp_path / "b" / "model.safetensors")
    assert made.keys() == held.keys() and torch.equal(made["1.1.linear.weight"], held["1.0.linear.weight"])


def test_heads_on_the_targets_lm_head(tmp_path, target):
    held = {k: t for k, t in lab.medusa_tensors().items() if ".linear." in k}
    config = {**lab.MEDUSA, "hidden_size": lab.HIDDEN, "vocab_size": lab.VOCAB, "original_lm_head": True}
    folder = lab.save(tmp_path / "a", config, held)
    assert examine(str(folder), str(target)).findings == ()
    assert read_ours("medusa", folder)[1].keys() == held.keys()
    assert run("convert", folder, "--to", "vllm", "-o", tmp_path / "b") == 3  # vLLM wants it beside the heads
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "target"]


@pytest.mark.parametrize("name", ["medusa", "eagle3", "eagle3-whole", "mlp", "glide-tied"])
def test_padding_is_cut_to_the_targets_vocabulary(name, tmp_path):
    make, layout = lab.LAYOUTS[name]
    source = make(tmp_path / "source")
    if name == "eagle3":  # its last kept token is in the padding otherwise
        lab.edit(source, lambda held: held["d2t"].sub_(0).__setitem__(11, 35 - 11))
        lab.edit(source, lambda held: held["t2d"].index_fill_(0, torch.tensor([39]), False).__setitem__(35, True))
    target = lab.write_target(tmp_path / "target", vocab_size=37)
    words = models.WordLevel({f"w{i}": i for i in range(36)}, "w0")
    assert run("convert", source, "--target", target, "-o", tmp_path / "never") == 3  # nothing says that it is padding
    Tokenizer(words).save(str(target / "tokenizer.json"))
    assert run("convert", source, "--target", target, "-o", tmp_path / "dest") == 0
    assert examine(str(tmp_path / "dest"), str(target)).findings == ()
    method = layout.partition("/")[0]
    before, after = read_ours(method, source)[1], read_ours(method, tmp_path / "dest")[1]
    assert any(before[k].shape != after[k].shape for k in before)
    assert all(torch.equal(before[k][: len(after[k])], after[k]) for k in before)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--to", "gguf"), 2, "one of ours, hf, modelopt, vllm for medusa"),
        (("--set", "medusa_num_heads=2"), 3, "as many as are stored"),
        (("--set", "medusa_num_heads"), 2, "KEY=VALUE"),
        (("--target", "nowhere"), 3, "no such folder"),
    ],
)
def test_a_refusal_leaves_nothing(words, code, text, tmp_path, capsys):
    source = lab.medusa_ours(tmp_path / "source")
    assert run("convert", source, "-o", tmp_path / "dest", "--json", *words) == code
    fault = json.loads(capsys.readouterr().out)["error"]
    assert text in fault["got"] + fault["expected"] + fault["todo"]
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_folder_that_is_taken_is_not_replaced(tmp_path):
    source = lab.medusa_ours(tmp_path / "source")
    assert run("convert", source, "-o", source) == 6
    assert sorted(p.name for p in source.iterdir()) == ["config.json", "model.safetensors"]


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    source = lab.medusa_ours(tmp_path / "source")
    monkeypatch.setattr("speccompile.doctor.convert.write_safetensors", fail)
    assert run("convert", source, "-o", tmp_path / "dest") == 130
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("make", [lab.lilicorr, lab.domino])
def test_what_a_format_cannot_state_is_not_converted(make, tmp_path, target):
    source = make(tmp_path / "source")
    assert run("convert", source, "--to", "speculators", "--target", target, "-o", tmp_path / "dest") == 3


def test_values_that_are_not_finite_are_not_converted(tmp_path):
    source = lab.medusa_ours(tmp_path / "source")
    lab.edit(source, lambda held: held.update({"0.1.weight": held["0.1.weight"] / 0}))
    assert run("convert", source, "-o", tmp_path / "dest") == 3
