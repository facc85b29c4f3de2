# SPDX-License-Identifier: Apache-2.0
"""Converted speculators in vLLM: its text is that of its plain decoding, its acceptance that of our own drafter."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speccompile.cli.main import main
from speccompile.recipe import load_recipe
from speccompile.recipe.training_plan import resolve_training
from speccompile.training.target import Target
from speccompile.training.text import read_tokenizer
from tests.doctor.vllm.drafters import Drafter, Text

ROOT = Path(__file__).parents[3]
TARGET = ROOT / "examples/models/pycode-16m"
NUM_DRAFTS, NUM_TOKENS = 4, 96
Learnt = dict[str, tuple[Path, list[int]]]
LAYERS = (1, 3, 6)
# Drafters that the test trains: both draft all tokens of a step in one run, from masks.
HEADS: dict[str, dict[str, Any]] = {
    "dflash": {"layers": LAYERS, "block_size": 6, "conv_kernel_size": 0, "selector_rank": 0, "starts": 0.3},
    "eagle3": {
        "layers": LAYERS, "num_layers": 2, "draft_vocab_size": 2048, "unrolled_steps": NUM_DRAFTS,
        "parallel_drafting": True, "starts": 0.3,
    },
}  # fmt: skip
ROUNDS = {"dflash": 25, "eagle3": 25}  # of the texts that they learn by heart
QUIET = {
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer, _ = read_tokenizer(TARGET)
    lines = (ROOT / "examples/prompts.jsonl").read_text().splitlines()[:6]
    return [list(tokenizer.encode(json.loads(line)["prompt"]).ids) for line in lines]


def decode(folder: Path, prompts: list[list[int]], config: dict[str, Any] | None, num_tokens: int) -> dict[str, Any]:
    """Returns what vLLM wrote and counted."""
    asked = {"target": str(TARGET), "prompts": prompts, "num_tokens": num_tokens, "speculative_config": config}
    script, out = Path(__file__).with_name("decode.py"), folder / "out.json"
    command = [os.environ["SPECCOMPILE_VLLM"], str(script), json.dumps(asked), str(out)]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env={**kept, **QUIET}, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Texts with as many tokens more as the last step may draft."""
    folder = tmp_path_factory.mktemp("plain")
    texts: list[list[int]] = decode(folder, prompts, None, NUM_TOKENS + NUM_DRAFTS)["texts"]
    return texts


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(TARGET, torch.float32)


@pytest.fixture(scope="module")
def texts(target: Target, prompts: list[list[int]], plain: list[list[int]]) -> list[Text]:
    return [Text(target, *pair) for pair in zip(prompts, plain, strict=True)]


def without_second(folder: Path) -> Path:
    """Writes the example's DFlash 2 drafter without convolutions and pair scores: DFlash, to be trained further."""
    source = ROOT / "examples/speculators/pycode-dflash2"
    held, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    nested = {k: v for k, v in config["dflash_config"].items() if not k.startswith(("conv_", "selector_"))}
    kept = {k: v for k, v in held.items() if "_conv." not in k and not k.startswith("candidate_selector.")}
    folder.mkdir()
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    stated = {**config, "architectures": ["DFlashDraftModel"], "dflash_config": nested}
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


@pytest.fixture(scope="module")
def learnt(target: Target, texts: list[Text], tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    """Folders of trained drafters in our own layout, and how many drafts each step accepts here."""
    folder, made = tmp_path_factory.mktemp("learnt"), {}
    starts = {"dflash": without_second(folder / "start"), "eagle3": None}
    for method, heads in HEADS.items():
        drafter = Drafter(target, method, heads, starts[method])
        drafter.learn(texts, ROUNDS[method])
        (folder / method).mkdir()
        drafter.trainable.save(folder / method)
        again = Drafter(target, method, heads, folder / method)
        made[method] = folder / method, again.accepted(texts, NUM_DRAFTS, NUM_TOKENS)
    return made


def converted(source: Path, layout: str, folder: Path) -> Path:
    made = folder / "converted"
    assert main(["convert", str(source), "--to", layout, "--target", str(TARGET), "-o", str(made)]) == 0
    return made


def drafted(method: str, model: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Returns what vLLM wrote and counted with a converted drafter."""
    masks = {"parallel_drafting": True} if "mask_hidden" in load_file(model / "model.safetensors") else {}
    config = {"method": method, "model": str(model), "num_speculative_tokens": NUM_DRAFTS, **masks}
    return decode(model.parent, prompts, config, NUM_TOKENS)


def length_of(found: dict[str, Any]) -> float:
    return float(1 + found["num_accepted_tokens"] / found["num_drafts"])


def compare(found: dict[str, Any], plain: list[list[int]], steps: list[int]) -> None:
    """Texts are equal, and so is the mean acceptance length within 2 %; every position has accepted drafts."""
    ours = [sum(accepted > i for accepted in steps) for i in range(NUM_DRAFTS)]
    print(
        f"vLLM: {found['num_drafts']} steps, accepted {found['num_accepted_tokens_per_pos']}; here {len(steps)}, {ours}"
    )
    assert found["texts"] == [text[:NUM_TOKENS] for text in plain]
    length = 1 + sum(steps) / len(steps)
    assert length_of(found) == pytest.approx(length, rel=0.02)
    assert length > 1.5 and ours[-1] > 5


@pytest.mark.parametrize(("name", "layout"), [("eagle3", "speculators"), ("medusa", "vllm")])
def test_a_converted_speculator_drafts_in_vllm_as_here(
    name: str,
    layout: str,
    target: Target,
    prompts: list[list[int]],
    plain: list[list[int]],
    texts: list[Text],
    tmp_path: Path,
) -> None:
    plan = resolve_training(load_recipe(ROOT / f"recipes/train/pycode-{name}.yaml"))
    found = drafted(name, converted(plan.output, layout, tmp_path), prompts)
    compare(found, plain, Drafter(target, name, plan.heads, plan.output).accepted(texts, NUM_DRAFTS, NUM_TOKENS))


@pytest.mark.parametrize(
    ("method", "layout"), [("dflash", "ours"), ("dflash", "speculators"), ("eagle3", "speculators")]
)
def test_a_converted_drafter_of_masks_drafts_in_vllm_as_here(
    method: str, layout: str, learnt: Learnt, prompts: list[list[int]], plain: list[list[int]], tmp_path: Path
) -> None:
    folder, steps = learnt[method]
    compare(drafted(method, converted(folder, layout, tmp_path), prompts), plain, steps)


def _next_layers(folder: Path) -> None:
    """The ids of the target's layers by the other way of counting, twice, as what was learnt by heart forgives one."""
    config = json.loads((folder / "config.json").read_text())
    config["aux_hidden_state_layer_ids"] = [max(i - 2, 1) for i in config["aux_hidden_state_layer_ids"]]
    (folder / "config.json").write_text(json.dumps(config))


def _reversed_streams(folder: Path) -> None:
    """The streams that a mask stands for in another order than those that `fc` reads."""
    tensors = load_file(folder / "model.safetensors")
    tensors["mask_hidden"] = torch.cat(tensors["mask_hidden"].chunk(3, -1)[::-1], -1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("method", "fault"), [("dflash", _next_layers), ("eagle3", _reversed_streams)])
def test_a_wrong_conversion_shows_in_the_acceptance(
    method: str,
    fault: Callable[[Path], None],
    learnt: Learnt,
    prompts: list[list[int]],
    plain: list[list[int]],
    tmp_path: Path,
) -> None:
    folder, steps = learnt[method]
    model = converted(folder, "speculators", tmp_path)
    fault(model)
    found = drafted(method, model, prompts)
    assert found["texts"] == [text[:NUM_TOKENS] for text in plain]
    assert length_of(found) < 0.9 * (1 + sum(steps) / len(steps))
