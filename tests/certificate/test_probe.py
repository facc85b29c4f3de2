# SPDX-License-Identifier: Apache-2.0
"""The probe names planted errors in copies of the trained examples, and says where it cannot."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speccompile.certificate.probe import ProbeTarget, open_probed, probe_case, probe_checkpoint
from speccompile.core import registry
from speccompile.core.registry import find_class
from speccompile.doctor.probe import ProbeReport
from speccompile.errors import CheckpointError, RecipeError
from speccompile.recipe import load_recipe
from speccompile.recipe.training_plan import resolve_training
from speccompile.training_contract import TrainingBatch

ROOT = Path(__file__).parents[2]
TARGET, HYBRID = ROOT / "examples/models/pycode-16m", ROOT / "examples/models/pycode-hybrid"
LINES = (ROOT / "examples/prompts.jsonl").read_text().splitlines()
PROMPTS = [json.loads(line)["prompt"] for line in LINES[:10]]
LONG = 1e9  # seconds: the clock decides nothing here
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target() -> ProbeTarget:
    return ProbeTarget(str(TARGET), PROMPTS, 96, LONG)


@pytest.fixture(scope="module")
def hybrid() -> ProbeTarget:
    return ProbeTarget(str(HYBRID), PROMPTS[:2], 40, LONG)


def of(target: ProbeTarget, num: int, num_new: int) -> ProbeTarget:
    """Returns the target with its first texts, cut to so many new tokens."""
    made = copy.copy(target)
    made.texts = [replace(t, batch=begun(t.batch, t.num_prompt + num_new)) for t in target.texts[:num]]
    return made


def begun(batch: TrainingBatch, num: int, num_read: int | None = None) -> TrainingBatch:
    """Returns the first `num` tokens of a text, of which the target has read `num_read`."""
    read = slice(0, num if num_read is None else num_read)
    layers = {i: x[:, read] for i, x in batch.layers.items()}
    return replace(batch, tokens=batch.tokens[:, :num], hidden=batch.hidden[:, read], layers=layers)


def copied(name: str, folder: Path, config: Callable[[Any], Any] | None, weights: Callable[[Tensors], Any]) -> Path:
    """Returns a copy of an example with another config and other weights."""
    shutil.copytree(ROOT / "examples/speculators" / name, folder)
    stated, held = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    if config is not None:
        config(stated)
    weights(held)
    (folder / "config.json").write_text(json.dumps(stated))
    save_file({k: t.contiguous() for k, t in held.items()}, folder / "model.safetensors")
    return folder


def swap_inputs(held: Tensors) -> None:
    for part in "qkv":
        key = f"midlayer.self_attn.{part}_proj.weight"
        held[key] = held[key].roll(held[key].shape[1] // 2, 1)


def store_ids(held: Tensors) -> None:
    held["d2t"] += torch.arange(len(held["d2t"]))


def insert_head(held: Tensors) -> None:
    """Puts the target's LM head before the four heads: the first one drafts the root."""
    lm_head = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]
    for key in sorted((k for k in held if k[0].isdigit()), reverse=True):
        number, _, tail = key.partition(".")
        held[f"{int(number) + 1}.{tail}"] = held.pop(key)
    for layer in range(2):
        held[f"0.{layer}.linear.weight"] = torch.zeros(384, 384, dtype=lm_head.dtype)
        held[f"0.{layer}.linear.bias"] = torch.zeros(384, dtype=lm_head.dtype)
    held["0.2.weight"] = lm_head


def keep(held: Tensors) -> None:
    """Leaves the weights as they are."""


IDS = "eagle_aux_hidden_state_layer_ids"
NESTED = "dflash_config"
ERRORS: dict[
    str, tuple[str, Callable[[Any], Any] | None, Callable[[Tensors], Any], tuple[int, int], dict[str, Any]]
] = {
    # name: example, change of its config, of its weights, texts and new tokens that are enough, what the weights mean
    "layers": ("pycode-eagle3", lambda c: c.update({IDS: [3, 5, 8]}), keep, (10, 96), {"layers": [1, 3, 6]}),
    "norm": ("pycode-eagle3", lambda c: c.update(norm_output=True), keep, (3, 64), {"norm_output": False}),
    "order": ("pycode-eagle3", None, swap_inputs, (2, 64), {"concat": "hidden_first"}),
    "map": ("pycode-eagle3", None, store_ids, (2, 64), {"d2t": "ids"}),
    "slot": (
        "pycode-dflash2",
        lambda c: c[NESTED].update(sample_from_anchor=True),
        keep,
        (2, 40),
        {"sample_from_anchor": False},
    ),
    "head": ("pycode-medusa", lambda c: c.update(medusa_num_heads=5), insert_head, (5, 64), {"first_head": 1}),
    "scale": ("pycode-mlp", lambda c: c.update(scale_input=False), keep, (5, 64), {"scale_input": True}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_planted_error_is_named(name, target, tmp_path):
    example, config, weights, texts, meant = ERRORS[name]
    folder = copied(example, tmp_path / example, config, weights)
    report = probe_case(open_probed(str(folder), target.aim), of(target, *texts), LONG)
    assert (report.verdict, report.meant) == ("otherwise", meant)
    (finding,) = report.findings
    assert finding.severity == "error" and str(folder) in finding.where
    before, after = report.readings[0], next(m for m in report.readings if m.changed == meant)
    assert after.mean_acceptance_length > before.mean_acceptance_length + 0.1 and after.by_position[0] > 0.3


def probe_module(hybrid: ProbeTarget, **stated: str) -> ProbeReport:
    return probe_case(open_probed(str(HYBRID), hybrid.aim, stated), hybrid, LONG)


def test_the_order_of_a_module_of_the_target_is_named(hybrid):
    report = probe_module(hybrid, concat="hidden_first")
    assert (report.verdict, report.meant) == ("otherwise", {"concat": "embedding_first"})


def test_a_module_that_is_right(hybrid):
    report = probe_module(hybrid)
    assert report.verdict == "as stated" and {"norms", "concat"}.isdisjoint(report.alike)


@pytest.mark.parametrize(
    ("name", "texts"), [("pycode-eagle3", (2, 64)), ("pycode-medusa", (5, 64)), ("pycode-mlp", (5, 64))]
)
def test_an_example_means_what_it_states(name, texts, target):
    case = open_probed(str(ROOT / "examples/speculators" / name), target.aim)
    report = probe_case(case, of(target, *texts), LONG)
    assert (report.verdict, report.findings) == ("as stated", ())
    assert report.json_from_report()["readings"][0]["changed"] == {}


def test_random_weights_are_undecided(target, tmp_path):
    def randomise(held: Tensors) -> None:
        generator = torch.Generator().manual_seed(0)
        for key, tensor in held.items():
            if tensor.dtype == torch.bfloat16 and tensor.dim() > 1:
                held[key] = torch.empty(tensor.shape).normal_(0, 0.02, generator=generator).bfloat16()

    folder = copied("pycode-eagle3", tmp_path / "random", None, randomise)
    report = probe_case(open_probed(str(folder), target.aim), of(target, 2, 32), LONG)
    assert report.verdict == "undecided" and report.meant == {} and "of first drafts are accepted" in report.reason
    assert report.findings[0].severity == "warning"


@pytest.mark.parametrize("name", ["pycode-eagle3", "pycode-dflash2", "pycode-medusa", "pycode-mlp", "pycode-hybrid"])
def test_chains_are_those_of_the_training_loop(name, target, hybrid):
    """The network that is trained drafts the same tokens, step by step, up to the first that the text does not have."""
    is_module = name == "pycode-hybrid"
    held, folder = (hybrid, HYBRID) if is_module else (target, ROOT / "examples/speculators" / name)
    case = open_probed(str(folder), held.aim)
    made = find_class(case.layout.probe)(case, held.parts)
    if is_module:
        trainer, settings = registry.trainer("mtp"), registry.method("mtp").TrainingConfig()
    else:
        plan = resolve_training(load_recipe(ROOT / f"recipes/train/{name}.yaml"))
        trainer, settings = plan.trainer, plan.heads
    trained = trainer.make(settings, held.parts, folder).eval()
    text, num = held.texts[1], made.max_drafts
    roots = torch.arange(text.num_prompt, text.batch.tokens.shape[1] - num, 5)
    with torch.no_grad():
        drafts = made.draft({c.name: c.stated for c in made.conventions}, text.batch, roots, num)
    tokens, num_accepted = text.batch.tokens[0], 0
    for root, chain in zip(roots.tolist(), drafts, strict=True):
        seen = begun(text.batch, root + 1, root)
        own, wanted = trained.draft(seen, num), tokens[root + 1 : root + 1 + num]
        accepted, same = (int((d == wanted).cumprod(0).sum()) for d in (chain, own))
        assert accepted == same and torch.equal(chain[: accepted + 1], own[: accepted + 1])
        num_accepted += accepted
    assert num_accepted > len(roots) // 4


def test_what_cannot_be_probed(target, tmp_path):
    with pytest.raises(CheckpointError, match="a drafter of dflash, eagle3, medusa, mlp, mtp"):
        open_probed(str(ROOT / "examples/speculators/pycode-prophet"), target.aim)
    folder = copied("pycode-mlp", tmp_path / "mlp", None, lambda held: held.pop("speculator.proj.0.weight"))
    with pytest.raises(CheckpointError, match="The probe runs once keys and shapes are right"):
        probe_checkpoint(str(folder), str(TARGET))


def test_texts_that_end_at_once_are_refused(monkeypatch):
    monkeypatch.setattr(ProbeTarget, "_write", lambda self, ids, num: original(self, ids, 1))
    with pytest.raises(RecipeError, match="--prompts"):
        ProbeTarget(str(TARGET), [[5, 6, 7]])


original = ProbeTarget._write
