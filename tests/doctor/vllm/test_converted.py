# SPDX-License-Identifier: Apache-2.0
"""Converted speculators in vLLM: its text is that of its plain decoding, its acceptance that of our loop in torch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from speccompile.cli.main import main
from speccompile.recipe import load_recipe
from speccompile.recipe.training_plan import resolve_training
from speccompile.training.reference import decode_chains
from speccompile.training.target import Target
from speccompile.training.text import read_tokenizer

ROOT = Path(__file__).parents[3]
TARGET = ROOT / "examples/models/pycode-16m"
NUM_DRAFTS, NUM_TOKENS = 4, 96
QUIET = {
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer, _ = read_tokenizer(TARGET)
    lines = (ROOT / "examples/prompts.jsonl").read_text().splitlines()[:6]
    return [list(tokenizer.encode(json.loads(line)["prompt"]).ids) for line in lines]


def decode(folder: Path, prompts: list[list[int]], config: dict[str, Any] | None) -> dict[str, Any]:
    """Returns what vLLM wrote and counted."""
    asked = {"target": str(TARGET), "prompts": prompts, "num_tokens": NUM_TOKENS, "speculative_config": config}
    script, out = Path(__file__).with_name("decode.py"), folder / "out.json"
    command = [os.environ["SPECCOMPILE_VLLM"], str(script), json.dumps(asked), str(out)]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env={**kept, **QUIET}, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    texts: list[list[int]] = decode(tmp_path_factory.mktemp("plain"), prompts, None)["texts"]
    return texts


@pytest.mark.parametrize(("name", "layout"), [("eagle3", "speculators"), ("medusa", "vllm")])
def test_a_converted_speculator_drafts_in_vllm_as_here(
    name: str, layout: str, prompts: list[list[int]], plain: list[list[int]], tmp_path: Path
) -> None:
    plan = resolve_training(load_recipe(ROOT / f"recipes/train/pycode-{name}.yaml"))
    folder = tmp_path / name
    words = ["convert", str(plan.output), "--to", layout, "--target", str(TARGET), "-o", str(folder)]
    assert main(words) == 0
    config = {"method": name, "model": str(folder), "num_speculative_tokens": NUM_DRAFTS}
    found = decode(tmp_path, prompts, config)
    assert found["texts"] == plain and all(len(text) == NUM_TOKENS for text in plain)
    target = Target(TARGET, torch.float32)
    needs = plan.trainer.needs(plan.heads, target.config)
    parts = target.parts(torch.zeros(target.dims.vocab_size, dtype=torch.int64))
    trained = plan.trainer.make(plan.heads, parts, plan.output).eval()
    steps = [s for ids in prompts for s in decode_chains(target, trained, needs, ids, NUM_DRAFTS, NUM_TOKENS)]
    length = 1 + sum(accepted for _, accepted in steps) / len(steps)
    theirs = 1 + found["num_accepted_tokens"] / found["num_drafts"]
    assert theirs == pytest.approx(length, rel=0.02) and length > 1.5
