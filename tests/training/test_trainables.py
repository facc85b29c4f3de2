# SPDX-License-Identifier: Apache-2.0
"""Every trainable: teacher forcing equals step by step, its file is read back, its loss falls."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from speccompile.core import registry
from speccompile.errors import CheckpointError, RecipeError
from speccompile.export.heads_file import read_heads
from speccompile.recipe import load_recipe
from speccompile.recipe.training_plan import resolve_training
from speccompile.training.losses import LossOptions, TrainedModule
from speccompile.training.stage import make_optimizer
from speccompile.training.states import batch_from_outputs, run_in_parts
from speccompile.training.target import Target
from tests.training.conftest import HEADS

METHODS = sorted(HEADS)
# Methods as `HEADS` has them, and forms that change what is trained.
MASKS = {"parallel_drafting": True, "mask_token_id": 2, "num_layers": 2}
CASES = [*((method, {}) for method in METHODS), ("eagle3", {"head_rank": 6}), ("eagle3", MASKS)]
NODES, ROOT = 14, 6  # the root is at position ROOT


@pytest.fixture(scope="module")
def model(target: Path) -> Target:
    return Target(target, torch.float32)


@pytest.fixture(scope="module")
def make(model, write_recipe):
    def made(method, start=None, **heads):
        plan = resolve_training(load_recipe(write_recipe(method, f"make-{method}")))
        config = replace(plan.heads, **heads)
        torch.manual_seed(1)
        counts = torch.arange(model.dims.vocab_size)
        return plan.trainer.make(config, model.parts(counts), start), plan.trainer.needs(config, model.config)

    return made


def shake(trainable, size=0.15):
    """Moves the weights away from the initial ones, which draft the same token everywhere."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainable.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * size


def test_every_trainer_is_tested():
    assert {method.name for method in registry.all_methods() if method.trainer} == set(HEADS)


@pytest.mark.parametrize(("method", "heads"), CASES)
def test_teacher_forced_equals_step_by_step(method, heads, make, model):
    fields = {field.name for field in dataclasses.fields(registry.method(method).TrainingConfig)}
    whole = {"starts": 1.0} if "starts" in fields else {}
    trainable, needs = make(method, **whole, **heads)
    shake(trainable, 0.4 if method == "dflash" or heads is MASKS else 0.15)  # masks are all alike
    num = min(3, trainable.num_positions)
    found = set()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, model.dims.vocab_size, (1, NODES), generator=generator)
        held = model.run(tokens[:, :ROOT], needs)
        drafts = trainable.draft(batch_from_outputs(tokens[:, : ROOT + 1], held, 0), num)
        tokens[0, ROOT + 1 : ROOT + 1 + num] = drafts
        states, row = forced(trainable, batch_from_outputs(tokens, model.run(tokens, needs), 0))
        candidates = [best(states, row, depth) for depth in range(num)]
        assert candidates == drafts.tolist()
        found.add(tuple(candidates))
    assert len(found) > 1


def forced(trainable, batch):
    """Returns the drafts of a batch whose drawn starts include the root, and the row of the root's chain."""
    for seed in range(64):
        drafted = trainable(replace(batch, seed=seed))
        rows = (drafted.labels[:, 0] == ROOT).nonzero()
        if len(rows):
            return drafted, int(rows[0])
    raise AssertionError("no start at the root")


def best(drafted, row, depth):
    assert int(drafted.labels[row, depth]) == ROOT + depth
    state, selection = drafted.states[row, depth], drafted.selection
    scores = state @ drafted.projections[depth].T
    if selection is not None:
        top, candidates = scores.topk(selection.num)
        pairs = selection.score(state[None], selection.before[row, depth][None], candidates[None])[0]
        scores = torch.full_like(scores, -torch.inf).index_copy(0, candidates, top + pairs)
    index = scores.argmax()
    return int(index if drafted.d2t is None else drafted.d2t[index])


@pytest.mark.parametrize("chain", [3, 40])
@pytest.mark.parametrize("method", ["draft_model", "early_exit"])
def test_every_position_of_a_text_is_trained(method, chain, make, model):
    trainable, needs = make(method, chain=chain)
    tokens = torch.randint(3, model.dims.vocab_size, (2, NODES), generator=torch.Generator().manual_seed(0))
    drafted = trainable(batch_from_outputs(tokens, model.run(tokens, needs), 0))
    assert drafted.states.shape[:2] == drafted.labels.shape == (2 * -(-NODES // chain), chain)
    assert drafted.labels[drafted.labels >= 0].tolist() == list(range(2 * NODES))


@pytest.mark.parametrize(("method", "heads"), CASES)
def test_the_file_comes_back(method, heads, make, model, tmp_path):
    trainable, needs = make(method, **heads)
    shake(trainable)
    with torch.no_grad():
        for parameter in trainable.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    trainable.save(tmp_path)
    again, _ = make(method, start=tmp_path, **heads)
    tokens = torch.arange(NODES)[None] + 3
    batch = batch_from_outputs(tokens, model.run(tokens, needs), seed=0)
    first, second = trainable(batch), again(batch)
    torch.testing.assert_close(first.states, second.states, rtol=0, atol=0)
    torch.testing.assert_close(first.projections[-1], second.projections[-1], rtol=0, atol=0)
    if first.d2t is not None:
        assert first.d2t.tolist() == second.d2t.tolist()


@pytest.mark.parametrize(("method", "heads"), CASES)
def test_the_loss_falls(method, heads, make, model):
    trainable, needs = make(method, **heads)
    module = TrainedModule(trainable, LossOptions(1.0, 1.0, torch.float32), model.dims.vocab_size)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, 32, (8, 24)))
    batch = batch_from_outputs(tokens, run_in_parts(model, tokens, needs), seed=0)
    optimizer = make_optimizer(module, 0.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    sums = []
    for _ in range(30):
        loss, measures = module(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sums.append(measures)
    first, last = (s[0] / s[2] for s in (sums[0], sums[-1]))
    assert (last < first - 0.01).all(), (first, last)


def test_a_head_of_two_products_begins_as_the_nearest_to_the_targets(make):
    """The nearest matrix of a rank is that of its largest singular values (Eckart and Young 1936)."""
    whole, low = (make("eagle3", head_rank=rank)[0].body for rank in (0, 6))
    left, values, right = torch.linalg.svd(whole.lm_head.weight.double(), full_matrices=False)
    nearest = left[:, :6] * values[:6] @ right[:6]
    made = (low.lm_head.weight @ low.lm_head_down.weight).double()
    torch.testing.assert_close(made, nearest, rtol=0, atol=1e-6)
    assert low.lm_head.weight.shape == (20, 6) and low.lm_head_down.weight.shape == (6, 16)
    assert not torch.allclose(made, whole.lm_head.weight.double(), atol=1e-3)


def test_a_file_of_other_sizes_is_refused(make, tmp_path):
    trainable, _ = make("medusa")
    trainable.save(tmp_path)
    with pytest.raises(CheckpointError, match="missing"):
        make("medusa", start=tmp_path, num_layers=2)
    with pytest.raises(CheckpointError, match="no such file"):
        read_heads(tmp_path / "none", {})


@pytest.mark.parametrize(
    ("method", "heads", "where"),
    [
        ("eagle3", {"layers": (0, 1, 9)}, "training.heads.layers"),
        ("eagle3", {"draft_vocab_size": 1000}, "training.heads.draft_vocab_size"),
        ("eagle3", {"head_rank": 16}, "training.heads.head_rank"),
        ("early_exit", {"num_exit_layers": 4}, "training.heads.num_exit_layers"),
        ("prophet", {"num_heads": 3, "num_kv_heads": 3}, "training.heads.num_heads"),
        ("dflash", {"layers": (0, 9)}, "training.heads.layers"),
        ("dflash", {"mask_token_id": 1000}, "training.heads.mask_token_id"),
        ("dflash", {"conv_group_size": 5}, "training.heads.conv_group_size"),
    ],
)
def test_sizes_that_do_not_go_with_the_target_are_refused(method, heads, where, make):
    with pytest.raises(RecipeError) as caught:
        make(method, **heads)
    assert caught.value.where == where
