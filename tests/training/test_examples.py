# SPDX-License-Identifier: Apache-2.0
"""The speculators in examples/ are what their recipes train."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from speccompile.recipe import load_recipe
from speccompile.recipe.training_plan import resolve_training
from speccompile.training.states import batch_from_outputs
from speccompile.training.target import Target

ROOT = Path(__file__).parents[2]
RECIPES = [
    path
    for path in sorted(ROOT.glob("recipes/train/pycode-*.yaml"))
    if (ROOT / "examples/speculators" / path.stem).is_dir()
]
NUM_TOKENS = 400  # of the example prompts
SMOLLM2 = ROOT / "examples/speculators/smollm2-eagle31"


@pytest.fixture(scope="module")
def model():
    return Target(ROOT / "examples/models/pycode-16m", torch.float32)


def test_every_speculator_has_its_recipe():
    made = {path.parent.name for path in ROOT.glob("examples/speculators/pycode-*/training.json")}
    assert made == {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_speculator_is_what_its_recipe_says(path, model):
    plan = resolve_training(load_recipe(path))
    folder = ROOT / "examples/speculators" / path.stem
    record = json.loads((folder / "training.json").read_text())
    # Settings that came later than a record have their defaults.
    heads = {**asdict(type(plan.heads)()), **record["plan"]["heads"]}
    assert json.loads(json.dumps(heads)) == json.loads(json.dumps(asdict(plan.heads)))
    for stage in ("plain", "generated"):
        assert record["plan"][stage] == getattr(plan.section, stage).model_dump(mode="json")
    needs = plan.trainer.needs(plan.heads, model.config)
    trainable = plan.trainer.make(plan.heads, model.parts(torch.ones(8192)), folder).eval()
    tokens = model_tokens()
    held = model.run(tokens[:, :-1], needs)
    drafts = trainable.draft(batch_from_outputs(tokens, held, 0), 3)
    assert drafts.shape == (3,) and (drafts >= 0).all() and (drafts < 8192).all()
    # Trained: on plain code its first drafts agree with the target far more often than by chance.
    whole = batch_from_outputs(tokens, model.run(tokens, needs), seed=0)
    with torch.no_grad():
        drafted = trainable(whole)
    first = drafted.labels[:, 0] >= 0
    candidate = (drafted.states[first, 0] @ drafted.projections[0].T).argmax(-1)
    candidate = candidate if drafted.d2t is None else drafted.d2t[candidate]
    assert (candidate == whole.dist_tokens[0, drafted.labels[first, 0], 0]).float().mean() > 0.25


def test_the_drafter_of_the_real_model_has_the_sizes_of_its_recipe():
    plan = resolve_training(load_recipe(ROOT / "recipes/train/smollm2-eagle31.yaml"))
    record = json.loads((SMOLLM2 / "training.json").read_text())["plan"]
    assert record["heads"] == json.loads(json.dumps(asdict(plan.heads)))
    assert (record["loss"], record["chain_weights"]) == (plan.section.loss, plan.section.chain_weights)
    assert (SMOLLM2 / "model.safetensors").stat().st_size < 25e6


def model_tokens():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ROOT / "examples/models/pycode-16m/tokenizer.json"))
    prompts = [json.loads(line)["prompt"] for line in (ROOT / "examples/prompts.jsonl").read_text().splitlines()]
    return torch.tensor([tokenizer.encode("\n\n".join(prompts)).ids[:NUM_TOKENS]])
