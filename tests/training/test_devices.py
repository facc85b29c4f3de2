# SPDX-License-Identifier: Apache-2.0
"""A step makes every tensor on the batch's device: torch's default device is one without memory here.

Where a tensor is made without a device it lands on `meta`, and the first operation with one of the batch fails. What
draws on the CPU says so and moves what it drew.
"""

from pathlib import Path

import pytest
import torch

from speccompile.core import registry
from speccompile.training.losses import LossOptions, TrainedModule
from speccompile.training.states import batch_from_outputs, first_nodes, run_in_parts, run_windows
from speccompile.training.target import Target
from tests.training.conftest import HEADS

NODES = 40
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
    tokens = torch.randint(3, model.dims.vocab_size, (2, NODES))
    is_label = torch.rand(2, NODES) < 0.5
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
    known = {name: first_nodes(name, value[:1], NODES - 1) for name, value in outputs.items()}
    with torch.device("meta"):
        drafts = trainable.draft(batch_from_outputs(tokens[:1], known, 0), min(2, trainable.num_positions))
    assert drafts.device.type == "cpu"


def test_a_gpu_reads_more_at_once_as_far_as_the_logits_fit(model, monkeypatch):
    assert run_windows(model, 512) == 8
    monkeypatch.setattr(model, "device", "cuda:0")
    assert run_windows(model, 512) == 128
    monkeypatch.setattr("speccompile.training.states._LOGIT_BYTES", 2 * model.dims.vocab_size * 1100)
    assert run_windows(model, 512) == 2
