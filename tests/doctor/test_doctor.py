# SPDX-License-Identifier: Apache-2.0
"""The doctor names every layout and finds every planted trap; without the check for it, it does not."""

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speccompile.checkpoints.tensor_files import TensorFiles
from speccompile.core import registry
from speccompile.core.registry import load_formats
from speccompile.doctor import doctor
from speccompile.doctor.doctor import examine, read_speculator
from speccompile.doctor.findings import Report
from speccompile.errors import CheckpointError
from speccompile.training_contract import TargetParts
from tests.checkpoints import checkpoint_lab as lab
from tests.doctor.config_traps import CONFIG_TRAPS, MASK_TRAPS, TAKEN
from tests.doctor.dflash_traps import DFLASH_TRAPS
from tests.doctor.traps import TRAPS as PLANTED
from tests.speculators.heads_lab import PUBLISHED_MLP

FORMATS = load_formats()
TRAPS = {**PLANTED, **CONFIG_TRAPS, **DFLASH_TRAPS, **MASK_TRAPS}
NUM_TOKENS = 36
LAYOUT_METHODS = {layout.name.partition("/")[0] for layout in FORMATS}
# Training options by method, where the defaults do not fit a tiny target.
SIZES: dict[str, dict[str, Any]] = {
    "eagle3": {"layers": (0, 2, 4), "draft_vocab_size": 48},
    "dflash": {"layers": (0, 2, 4), "mask_token_id": 63},
}


def look(folder: Path, target: Path, **options: Any) -> Report:
    return examine(str(folder), str(target), **options)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return lab.write_target(tmp_path / "target")


@pytest.mark.parametrize("name", lab.LAYOUTS)
def test_a_sound_checkpoint_is_named_and_has_no_finding(name, tmp_path, target):
    make, layout = lab.LAYOUTS[name]
    report = look(make(tmp_path / "speculator"), target)
    assert [f.text() for f in report.findings] == []
    assert (report.format, report.exit_code, report.has_read_values) == (layout, 0, True)


@pytest.mark.parametrize("name", TRAPS)
def test_a_planted_trap_is_found_by_its_check_alone(name, tmp_path):
    trap = TRAPS[name]
    target = lab.write_target(tmp_path / "target", **trap.target)
    folder = trap.make(tmp_path / "speculator")
    trap.plant(folder)
    report = look(folder, target)
    lines = "\n".join(f.text() for f in report.findings)
    assert {f.check for f in report.findings} == {trap.check, *trap.also}, lines
    (found,) = (f for f in report.findings if f.check == trap.check)
    assert re.search(trap.words, found.text()), lines
    assert found.severity == trap.severity and report.exit_code == (3 if "error" in lines else 0)
    assert all((found.where, found.got, found.expected)) and found.todo.endswith("."), lines
    # A doctor that skips the check does not see it.
    blind = [replace(f, checks=tuple(c for c in f.checks if c.name != trap.check)) for f in FORMATS]
    assert {f.check for f in look(folder, target, formats=blind).findings} == set(trap.also)


@pytest.mark.parametrize(("make", "changes"), TAKEN.values(), ids=TAKEN.keys())
def test_a_key_that_says_what_is_computed_anyway_is_taken(make, changes, tmp_path, target):
    folder = make(tmp_path / "speculator")
    lab.set_config(folder, **changes)
    assert [f.text() for f in look(folder, target).findings] == []


def test_every_check_has_a_trap():
    assert {c.name for f in FORMATS for c in f.checks} == {trap.check for trap in TRAPS.values()}


COPIES = {
    "eagle": (lab.eagle_ours, "embed_tokens.weight", "model.embed_tokens.weight"),
    "eagle3": (lab.eagle3_ours, "embed_tokens.weight", "model.embed_tokens.weight"),
    "eagle3-numbered": (lab.eagle3_numbered, "embed_tokens.weight", "model.embed_tokens.weight"),
    "eagle3-speculators": (lab.eagle3_speculators, "embed_tokens.weight", "model.embed_tokens.weight"),
    "peagle": (lab.peagle_ours, "embed_tokens.weight", "model.embed_tokens.weight"),
    "dflash": (lab.dflash_one, "embed_tokens.weight", "model.embed_tokens.weight"),
    "dflash-head": (lab.dflash_two, "lm_head.weight", "lm_head.weight"),
    "dflash-tied": (lab.dflash_one, "lm_head.weight", "model.embed_tokens.weight"),
    "mtp": (lab.mtp_ours, "mtp.embed_tokens.weight", "model.embed_tokens.weight"),
    "mtp-glm": (lab.mtp_glm, f"model.layers.{lab.LAYERS}.embed_tokens.weight", "model.embed_tokens.weight"),
    "mtp-glm-head": (lab.mtp_glm, f"model.layers.{lab.LAYERS}.shared_head.head.weight", "lm_head.weight"),
}
CHANGES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "copy": (lambda t: t, False),
    "trained on": (lambda t: t * 3 + 0.1 * torch.roll(t, 1, 0), False),
    "zeros": (torch.zeros_like, True),
    "ones": (torch.ones_like, True),
    "another order": (lambda t: torch.roll(t, 1, 0), True),
    "initial values": (lambda t: lab.draw({"": tuple(t.shape)}, 3)[""], True),
}


@pytest.mark.parametrize(("make", "key", "table"), COPIES.values(), ids=COPIES.keys())
def test_a_stored_copy_of_a_table_of_the_target_that_is_none_is_said(make, key, table, tmp_path, target):
    folder, tables = make(tmp_path / "speculator"), lab.write_tables(target)
    if table == "model.embed_tokens.weight" and key == "lm_head.weight":
        save_file({table: tables[table]}, target / "model.safetensors")
    for name, (change, is_said) in CHANGES.items():
        lab.edit(folder, lambda held, change=change: held.update({key: change(tables[table])}))
        found = [f for f in look(folder, target).findings if f.check == "target.tables" and f"({key})" in f.where]
        assert [f.severity for f in found] == ["warning"] * is_said, name
        assert "target.tables" not in {f.check for f in look(folder, target, values=False).findings}


def test_a_build_says_that_a_stored_table_is_unlike_the_targets(tmp_path, target, caplog):
    from speccompile.checkpoints.checkpoint import read_dims
    from speccompile.core.jobs import GraphJob, SourceContext

    folder = lab.eagle3_ours(tmp_path / "speculator")
    context = SourceContext("checkpoint", 64, 6, read_dims(target), GraphJob("target", str(target)))
    method = registry.method("eagle3")
    tables = lab.write_tables(target)["model.embed_tokens.weight"]
    for table, num in ((tables, 0), (tables.flip(0), 1)):
        lab.edit(folder, lambda held, table=table: held.update({"embed_tokens.weight": table}))
        for job in method.graph_jobs(method.Config(str(folder), layers=(0, 2, 4))):
            registry.find_class(job.source)(job, context).check()
        assert caplog.text.count("(embed_tokens.weight): got a table unlike the target's embeddings") == num


@pytest.mark.parametrize(("vocab", "words"), [(38, "convert --target. cuts the rows"), (44, "cannot be made up")])
def test_a_padded_vocabulary_is_distinguished_from_another(vocab, words, tmp_path):
    from tokenizers import Tokenizer, models

    target = lab.write_target(tmp_path / "target", vocab_size=vocab)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(NUM_TOKENS)}, "w0")).save(str(target / "tokenizer.json"))
    (found,) = look(lab.medusa_ours(tmp_path / "speculator"), target).findings
    assert found.check == "target.vocabulary" and "the tokenizer has 36 tokens" in found.got
    assert words in found.todo.replace("`", ".")


def test_without_a_target_its_checks_are_silent(tmp_path):
    assert examine(str(lab.glide_ours(tmp_path))).findings == ()


def test_an_override_takes_the_place_of_the_config(tmp_path, target):
    folder = lab.medusa_ours(tmp_path / "speculator")
    lab.set_config(folder, medusa_num_heads=2)
    assert look(folder, target, overrides={"medusa_num_heads": 3}).findings == ()


@pytest.mark.parametrize("name", lab.LAYOUTS)
def test_a_speculator_of_another_method_is_said_to_be_one(name, tmp_path):
    make, layout = lab.LAYOUTS[name]
    folder, own = make(tmp_path / "speculator"), layout.partition("/")[0]
    for method in sorted(LAYOUT_METHODS - {own}):
        formats = [f for f in FORMATS if f.method == method]
        with pytest.raises(CheckpointError, match=re.escape(f"({layout})")) as caught:
            doctor.check_speculator(folder, formats)
        assert caught.value.expected == f"a speculator of the method {method}"
        assert f"the method {own} " in caught.value.todo


def test_every_source_says_what_it_was_given(tmp_path, target):
    from speccompile.checkpoints.checkpoint import read_dims
    from speccompile.core.jobs import GraphJob, SourceContext

    given = {layout.partition("/")[0]: name for name, (_, layout) in lab.LAYOUTS.items() if name != "mtp-qwen"}
    folders = {own: lab.LAYOUTS[name][0](tmp_path / name) for own, name in given.items() if name in lab.LAYOUTS}
    context = SourceContext("checkpoint", 64, 6, read_dims(target), GraphJob("target", str(target)))
    for name in sorted(LAYOUT_METHODS):
        method = registry.method(name)
        for own, folder in folders.items():
            if own in (name, "mtp"):  # the module may be in any model's files
                continue
            job = method.graph_jobs(method.Config(str(folder)))[0]
            wanted = "a language model" if name == "draft_model" else f"a speculator of the method {name}"
            with pytest.raises(CheckpointError, match=f"expected {wanted}"):
                registry.find_class(job.source)(job, context)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("pwned"),))


def damage_cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def damage_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with (folder / "medusa_lm_head.pt").open("wb") as file:
        pickle.dump({"0.0.linear.weight": Payload()}, file, protocol=2)


def damage_zip(folder: Path) -> None:
    torch.save({"0.0.linear.weight": Payload()}, folder / "medusa_lm_head.pt")
    (folder / "model.safetensors").unlink()


def damage_zip_cut(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(held, folder / "pytorch_model.bin")
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_other_things(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"epoch": 3, "loss": 0.5}, folder / "medusa_lm_head.pt")


def damage_twice(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(held, folder / "a.safetensors")
    save_file({"0.1.weight": held["0.1.weight"]}, folder / "b.safetensors")


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (damage_cut, "the file is truncated"),
    "code": (damage_pickle, "weights-only reader refuses: it asks for getattr"),
    "code in a zip": (damage_zip, "torch's weights-only reader refuses"),
    "half a pickle": (damage_zip_cut, "a file that cannot be read"),
    "no tensors": (damage_other_things, "other things than tensors"),
    "one key twice": (damage_twice, "got 0.1.weight also in a.safetensors"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "got no weights"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no such file"),
    "half a config": (lambda folder: (folder / "config.json").write_text("{"), "expected a JSON object"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_cannot_be_read_is_a_finding(name, tmp_path, target, monkeypatch):
    monkeypatch.chdir(tmp_path)
    harm, words = DAMAGES[name]
    folder = lab.medusa_ours(tmp_path / "speculator")
    harm(folder)
    report = look(folder, target)
    (found,) = report.findings
    assert found.check == "files" and words in found.text(), found.text()
    assert report.exit_code == 3 and not (tmp_path / "pwned").exists()


KNOWN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mimo": ({"model_type": "mimo"}, ["model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.mlp.up_proj.weight"]),
    "hydra": ({"hydra_num_heads": 4}, ["hydra_mlp.0.0.linear.weight", "hydra_lm_head.0.weight"]),
    "redrafter": ({}, ["input_proj.weight", "lm_head.0.linear.weight", "rnn_w.weight"]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_and_not_supported_is_named(name, tmp_path):
    config, keys = KNOWN[name]
    lab.save(tmp_path, config, lab.draw(dict.fromkeys(keys, (2, 2))))
    report = examine(str(tmp_path))
    assert (report.format, report.method, report.exit_code) == (name, "", 3)
    assert "known but not supported yet" in report.findings[0].todo


def test_the_speculators_format_says_whether_it_is_a_p_eagle(tmp_path):
    folder = lab.eagle3_speculators(tmp_path)
    lab.set_config(folder, speculators_model_type="peagle")
    report = examine(str(folder))
    assert report.format == "eagle3/speculators"
    assert {f.check for f in report.findings} == {"eagle3.config", "eagle3.mask"}


def test_a_language_model_is_no_speculator(tmp_path):
    keys = {
        "model.embed_tokens.weight": (8, 4),
        "model.layers.0.input_layernorm.weight": (4,),
        "lm_head.weight": (8, 4),
    }
    (found,) = examine(str(lab.save(tmp_path, lab.LLAMA, lab.draw(keys)))).findings
    assert found.check == "format" and "a causal language model (LlamaForCausalLM)" in found.got


def test_keys_of_nothing_known(tmp_path):
    (found,) = examine(str(lab.save(tmp_path, {}, lab.draw({"a.b": (2,)})))).findings
    assert "1 keys of no known layout (a.b, ...)" in found.got


@pytest.mark.parametrize("name", PUBLISHED_MLP)
def test_published_sizes_are_checked_by_their_headers_alone(name, tmp_path, monkeypatch):
    def refuse(self: TensorFiles, key: str) -> None:
        raise AssertionError(f"{key} was read")

    monkeypatch.setattr(TensorFiles, "array", refuse)
    hidden, inner, vocab, num, tie, scale = PUBLISHED_MLP[name]
    config = lab.mlp_config(hidden, inner, vocab, num, tie, scale)
    folder = lab.write_sparse(tmp_path / "s", config, lab.mlp_shapes(hidden, inner, vocab, num, first_only=tie))
    target = lab.write_target(tmp_path / "t", hidden_size=hidden, vocab_size=vocab)
    report = look(folder, target, values=None if name != "granite-34b" else False)
    assert [f.text() for f in report.findings] == [] and not report.has_read_values
    lab.write_target(tmp_path / "t", hidden_size=hidden + 8, vocab_size=vocab)
    assert [f.check for f in look(folder, target, values=False).findings] == ["target.width"]


def test_values_are_read_when_asked_to_be(tmp_path, target, monkeypatch):
    folder = lab.medusa_ours(tmp_path / "speculator")
    lab.edit(folder, lambda held: held.update({"0.1.weight": held["0.1.weight"] / 0}))
    assert look(folder, target, values=False).findings == ()
    monkeypatch.setattr(doctor, "MAX_AUTO_BYTES", 100)
    assert look(folder, target).findings == ()
    assert [f.check for f in look(folder, target, values=True).findings] == ["values.finite"]


def test_a_folder_in_shards(tmp_path, target):
    folder = lab.eagle3_ours(tmp_path / "speculator")
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(held)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for shard, keys in shards.items():
        save_file({k: held[k] for k in keys}, folder / shard)
    weight_map = {k: shard for shard, keys in shards.items() for k in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    report = look(folder, target)
    assert report.findings == () and report.num_tensors == len(held)


def test_a_method_refuses_with_a_hint_at_the_doctor(tmp_path):
    from speccompile.speculators.medusa.checkpoint import FORMATS

    folder = lab.medusa_ours(tmp_path)
    lab.set_config(folder, medusa_num_heads=2)
    lab.edit(folder, lambda held: held.pop("0.0.linear.weight"))
    with pytest.raises(CheckpointError, match=r"`speccompile doctor .*` lists every finding \(1 more\)"):
        read_speculator(folder, FORMATS)


# What training writes for a draft model is a language model without masks, which has no layout here.
TRAINED = {m.name for m in registry.all_methods() if m.trainer} & LAYOUT_METHODS - {"draft_model"}


@pytest.mark.parametrize("method", sorted(TRAINED))
def test_what_training_writes_is_sound_and_ours(method, tmp_path):
    hidden, vocab = 96, 64
    config = {**lab.LLAMA, "hidden_size": hidden, "vocab_size": vocab, "num_attention_heads": 6, "head_dim": 16}
    generator = torch.Generator().manual_seed(5)
    tables = [torch.randn((vocab, hidden), generator=generator) for _ in range(2)]
    target = lab.write_target(tmp_path / "target", **config)
    parts = TargetParts(config, target, *tables, torch.ones(vocab, dtype=torch.int64), norm=torch.ones(hidden))
    config = registry.method(method).TrainingConfig
    registry.trainer(method).make(config(**SIZES.get(method, {})), parts, None).save(tmp_path)
    report = look(tmp_path, target)
    assert [f.text() for f in report.errors] == [] and report.format == f"{method}/ours"
