# SPDX-License-Identifier: Apache-2.0
"""P-EAGLE under training: its numbers are numpy's from the written file, which the doctor takes and converts."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from speccompile.cli.main import main
from speccompile.core import registry
from speccompile.doctor.doctor import examine
from speccompile.errors import CheckpointError, RecipeError
from speccompile.training.losses import LossOptions, TrainedModule
from speccompile.training.stage import make_optimizer, measures_from_sums
from speccompile.training.states import batch_from_outputs
from speccompile.training.target import Target
from tests.speculators import eagle_lab, peagle_lab
from tests.training.test_trainables import shake

DRAFTS = 4
HEADS = {
    "layers": eagle_lab.STREAMS, "num_layers": 2, "intermediate_size": 24, "draft_vocab_size": peagle_lab.DRAFTED,
    "unrolled_steps": DRAFTS, "parallel_drafting": True, "mask_token_id": peagle_lab.MASK, "starts": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return Target(eagle_lab.write_target(tmp_path_factory.mktemp("parallel") / "target"), torch.float32)


def make(target, start=None, **changes):
    trainer, config = registry.trainer("eagle3"), registry.method("eagle3").TrainingConfig(**{**HEADS, **changes})
    torch.manual_seed(2)
    parts = target.parts(torch.arange(target.dims.vocab_size))
    return trainer.make(config, parts, start), trainer.needs(config, target.config)


@pytest.fixture(scope="module")
def written(target, tmp_path_factory):
    """A drafter in which every part matters, and its folder, which has the same weights."""
    trainable, needs = make(target)
    shake(trainable)
    with torch.no_grad():
        for parameter in trainable.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    trainable.embeddings = trainable.embeddings.to(torch.bfloat16).float()
    folder = tmp_path_factory.mktemp("drafter")
    trainable.save(folder)
    return trainable, needs, folder


def test_a_trained_drafter_is_the_published_one(written, target):
    """Teacher-forced and drafted probabilities of every start, beside those of the file by the public description."""
    trainable, needs, folder = written
    held = {name: t.float().numpy() for name, t in load_file(folder / "model.safetensors").items() if name != "t2d"}
    held["d2t"] = held["d2t"].astype(np.int64)
    tokens = torch.randint(0, 36, (1, 13), generator=torch.Generator().manual_seed(6))
    outputs = target.run(tokens, needs)
    drafted = trainable(batch_from_outputs(tokens, outputs, 0))
    states = torch.cat([outputs[f"layer.{i}"][0].float() for i in eagle_lab.STREAMS], -1).numpy()
    assert sorted(drafted.labels[:, 0].tolist()) == list(range(1, 13))
    for row in range(12):
        root = int(drafted.labels[row, 0])
        wanted = peagle_lab.probs_after(held, states[:root], tokens[0, 1 : root + 1].tolist(), DRAFTS - 1)
        logits = (drafted.states[row] @ drafted.projections[0].T).detach().double()
        found = np.zeros_like(wanted)
        found[:, drafted.d2t.numpy()] = logits.softmax(-1).numpy()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
        known = {name: value[:, :root] for name, value in outputs.items()}
        drafts = trainable.draft(batch_from_outputs(tokens[:, : root + 1], known, 0), DRAFTS)
        assert drafts.tolist() == wanted.argmax(-1).tolist()


def test_the_doctor_takes_and_converts_it(written, target, tmp_path):
    _, _, folder = written
    report = examine(str(folder), str(target.folder))
    assert (report.format, report.findings) == ("eagle3/ours", ())
    made = tmp_path / "made"
    assert main(["convert", str(folder), "--to", "speculators", "--target", str(target.folder), "-o", str(made)]) == 0
    config = json.loads((made / "config.json").read_text())
    assert (config["speculators_model_type"], config["mask_token_id"]) == ("peagle", peagle_lab.MASK)
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2
    before, after = (load_file(path / "model.safetensors") for path in (folder, made))
    assert torch.equal(before["mask_hidden"], after["mask_hidden"])
    assert torch.equal(before["embed_tokens.weight"], after["embed_tokens.weight"])


def test_one_text_is_learnt_by_heart(target):
    trainable, needs = make(target, num_layers=1, draft_vocab_size=0)
    module = TrainedModule(trainable, LossOptions(1.0, 1.0, torch.float32), target.dims.vocab_size)
    tokens = torch.randint(3, 36, (1, 24), generator=torch.Generator().manual_seed(0))
    held, optimizer = target.run(tokens, needs), make_optimizer(module, 0.0)
    masks = [trainable.mask_hidden, trainable.mask_embedding]
    before = [mask.detach().clone() for mask in masks]
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    lengths = []
    for seed in range(60):
        loss, sums = module(batch_from_outputs(tokens, held, seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lengths.append(measures_from_sums(sums)["acceptance_length"])
    assert lengths[0] < 2.5 and lengths[-1] > 3.8
    assert all((mask != old).all() for mask, old in zip(masks, before, strict=True))


def test_a_start_with_other_embeddings_is_refused(written, target, tmp_path):
    _, _, folder = written
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"][3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="embeddings of its own"):
        make(target, tmp_path)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"unrolled_steps": 1}, "unrolled_steps"),
        ({"mask_token_id": -2}, "mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_settings_that_give_no_drafter_are_refused(changes, where, target):
    with pytest.raises(RecipeError) as caught:
        make(target, **changes)
    assert caught.value.where == f"training.heads.{where}"
