# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction modules under training, over layers of several architectures; what is written."""

import json
from pathlib import Path

import pytest
import torch

from speccompile.checkpoints.checkpoint import check_checkpoint, read_dims
from speccompile.core import registry
from speccompile.doctor.doctor import examine
from speccompile.errors import CheckpointError, RecipeError
from speccompile.training.losses import LossOptions, TrainedModule
from speccompile.training.states import batch_from_outputs, first_nodes, run_in_parts, run_windows
from speccompile.training.target import Target
from tests.speculators import mtp_lab as lab
from tests.training.conftest import HEADS
from tests.training.test_trainables import best, forced, shake

NODES, ROOT = 14, 6
FAMILIES = ("qwen3", "glm4_moe", "qwen3_5_text")


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Returns (family, settings) -> target, trainable."""
    folder, held = tmp_path_factory.mktemp("modules"), {}

    def made(family, start=None, **fields):
        if family not in held:
            held[family] = Target(lab.write_target(folder / family, family), torch.float32)
        target, method = held[family], registry.method("mtp")
        parts = target.parts(torch.ones(target.dims.vocab_size, dtype=torch.int64))
        torch.manual_seed(1)
        return target, registry.trainer("mtp").make(method.TrainingConfig(**fields), parts, start)

    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_teacher_forced_equals_step_by_step_for_every_kind_of_layer(family, make):
    target, trainable = make(family)
    shake(trainable)
    needs = registry.trainer("mtp").needs(None, target.config)
    tokens = torch.randint(3, 40, (1, NODES), generator=torch.Generator().manual_seed(2))
    held = target.run(tokens[:, :ROOT], needs)
    drafts = trainable.draft(batch_from_outputs(tokens[:, : ROOT + 1], held, 0), 3)
    tokens[0, ROOT + 1 : ROOT + 4] = drafts
    states, row = forced(trainable, batch_from_outputs(tokens, target.run(tokens, needs), 0))
    assert [best(states, row, depth) for depth in range(3)] == drafts.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_training_drafts_what_transformers_module_drafts(family, make, tmp_path):
    """From the written file: a trainable, transformers' module of the same weights, and the same three tokens."""
    target, trainable = make(family, into_target=True)
    shake(trainable)
    with torch.no_grad():
        for parameter in trainable.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    trainable.save(tmp_path)
    text = [3, 1, 4, 1, 5, 9, 2]
    held = target.run(torch.tensor([text[:-1]]), registry.trainer("mtp").needs(None, target.config))
    drafts = trainable.draft(batch_from_outputs(torch.tensor([text]), held, 0), 3)
    module = lab.random_module(target.folder)[1]
    stored = {n: t.float() for n, t in lab.load_file(tmp_path / "model.safetensors").items() if n.startswith("mtp.")}
    module.load_state_dict({name.removeprefix("mtp."): tensor for name, tensor in stored.items()})
    assert lab.Oracle(target.folder, module).drafts(text, 3) == drafts.tolist()


def test_the_target_with_the_module_inside_is_a_whole_target(make, tmp_path):
    """Files and weights of the target are kept as they are; a module that it has is replaced."""
    target, trainable = make("qwen3", into_target=True)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    trainable.save(first)
    shake(trainable)
    trainable.into = first
    trainable.save(second)
    before = lab.load_file(target.folder / "model.safetensors")
    for folder in (first, second):
        held = lab.load_file(folder / "model.safetensors")
        assert {n for n in held if not n.startswith("mtp.")} == set(before)
        assert all(torch.equal(held[name], tensor) for name, tensor in before.items())
        assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in target.folder.iterdir())
        assert json.loads((folder / "config.json").read_text())["mtp_num_hidden_layers"] == 1
        check_checkpoint(folder, read_dims(folder))
        report = examine(str(folder), str(target.folder))
        assert (report.format, report.findings) == ("mtp/in_target", ())
    assert not torch.equal(lab.load_file(first / "model.safetensors")["mtp.fc.weight"], held["mtp.fc.weight"])


def test_a_module_begins_as_the_targets_layer_on_its_state(make):
    target, trainable = make("qwen3")
    last = dict(target.model.model.layers[-1].named_parameters())
    own = dict(trainable.module.layers[0].named_parameters())
    assert all(torch.equal(own[name], last[name]) for name in own)
    width = target.dims.hidden_size
    assert torch.equal(trainable.module.fc.weight[:, width:], torch.eye(width))


def test_a_start_of_another_architecture_is_refused(make, tmp_path):
    make("glm4_moe")[1].save(tmp_path)
    with pytest.raises(CheckpointError, match="missing"):
        make("qwen3", start=Path(tmp_path))


@pytest.mark.parametrize(("fields", "where"), [({"unrolled_steps": 0}, "unrolled_steps"), ({"starts": 1.5}, "starts")])
def test_settings_out_of_range_are_refused(fields, where):
    with pytest.raises(RecipeError) as caught:
        registry.method("mtp").TrainingConfig(**fields)
    assert caught.value.where == f"training.heads.{where}"


NUM_NODES = 40
CASES = [*sorted(HEADS.items()), ("eagle3", {**HEADS["eagle3"], "fc_norm": True, "norm_output": True})]


@pytest.fixture(scope="module")
def model(target: Path) -> Target:
    return Target(target, torch.float32)


@pytest.mark.parametrize(("method", "heads"), CASES)
def test_a_step_and_a_draft_make_their_tensors_on_the_batch_s_device(method, heads, model):
    found = registry.trained_method(method)
    config, trainer = found.TrainingConfig(**heads), registry.trainer(method)
    trainable = trainer.make(config, model.parts(torch.arange(model.dims.vocab_size)), None)
    needs = trainer.needs(config, model.config)
    module = TrainedModule(trainable, LossOptions(0.8, 0.7, torch.bfloat16), model.dims.vocab_size)
    tokens = torch.randint(3, model.dims.vocab_size, (2, NUM_NODES))
    is_label = torch.rand(2, NUM_NODES) < 0.5
    with torch.device("meta"):
        outputs = run_in_parts(model, tokens, needs)
        batch = batch_from_outputs(tokens, outputs, 3, "cpu", is_label)
        with torch.autocast("cpu", torch.bfloat16):
            loss, sums = module(batch)
        loss.backward()
    assert loss.device.type == sums.device.type == "cpu" and float(loss.detach()) > 0
    assert all(p.grad is None or p.grad.device.type == "cpu" for p in module.parameters())
    if method == "early_exit":  # reads the target's first layers from its files
        return
    known = {name: first_nodes(name, value[:1], NUM_NODES - 1) for name, value in outputs.items()}
    with torch.device("meta"):
        drafts = trainable.draft(batch_from_outputs(tokens[:1], known, 0), min(2, trainable.num_positions))
    assert drafts.device.type == "cpu"


def test_a_gpu_reads_more_at_once_as_far_as_the_logits_fit(model, monkeypatch):
    assert run_windows(model, 512) == 8
    monkeypatch.setattr(model, "device", "cuda:0")
    assert run_windows(model, 512) == 128
    monkeypatch.setattr("speccompile.training.states._LOGIT_BYTES", 2 * model.dims.vocab_size * 1100)
    assert run_windows(model, 512) == 2
