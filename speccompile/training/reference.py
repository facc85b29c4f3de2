# SPDX-License-Identifier: Apache-2.0
"""Greedy draft-verify with a plain loop over torch modules: measures acceptance, not speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.recipe.training_plan import TrainingPlan
from speccompile.training.joint import ADAPTER
from speccompile.training.states import batch_from_outputs, first_nodes
from speccompile.training.target import Target, keep_pages
from speccompile.training_contract import TargetNeeds, TrainingBatch

MAX_NEW_TOKENS = 128


def measure_chains(
    plan: TrainingPlan,
    prompts: Sequence[list[int]],
    num_drafts: int | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Measures mean acceptance length (1 + accepted / steps) and acceptance by position of greedy chains.

    Args:
        num_drafts: drafts of a chain; by default as many as were trained.
        progress: called with "measure: prompts DONE/TOTAL".

    Raises:
        CheckpointError: the speculator or the target cannot be read.
    """
    keep_pages()
    source = resolve_checkpoint(plan.target)
    device = plan.section.device
    lora = None if plan.section.joint is None else str(plan.output / ADAPTER)
    target = Target(source, torch.float32, device, lora)
    needs = plan.trainer.needs(plan.heads, target.config)
    parts = target.parts(torch.zeros(target.dims.vocab_size, dtype=torch.int64))
    trainable = plan.trainer.make(plan.heads, parts, plan.output).eval().to(device)
    num_drafts = num_drafts or trainable.num_positions
    tried, kept, steps, tokens = [0] * num_drafts, [0] * num_drafts, 0, 0
    for done, prompt in enumerate(prompts):
        progress(f"measure: prompts {done}/{len(prompts)}")
        for _, accepted in decode_chains(target, trainable, needs, prompt, num_drafts):
            steps, tokens = steps + 1, tokens + accepted + 1
            for position in range(num_drafts):
                tried[position] += position <= accepted
                kept[position] += position < accepted
    return {
        "num_prompts": len(prompts),
        "num_drafts": num_drafts,
        "mean_acceptance_length": round(tokens / max(1, steps), 4),
        "by_position": [round(k / t, 4) if t else 0.0 for k, t in zip(kept, tried, strict=True)],
        "steps": steps,
    }


@torch.no_grad()
def decode_chains(
    target: Target,
    trainable: Any,
    needs: TargetNeeds,
    prompt: list[int],
    num_drafts: int,
    max_new_tokens: int = MAX_NEW_TOKENS,
    is_bounded: bool = False,
    text: Sequence[int] | None = None,
) -> list[tuple[int, int]]:
    """Returns how many tokens each step drafted and accepted, greedily.

    The first token is the target's alone, and the first root. The target reads the whole text again in each step.

    Args:
        is_bounded: chains end one token before the text does, as the engine's do, so that no step goes beyond it.
        text: `max_new_tokens` or more tokens in the place of the target's greedy ones, which None means.
    """
    tokens = list(prompt)
    held = target.run(torch.tensor([tokens]), TargetNeeds(True, needs.layers, needs.caches))
    tokens.append(int(held["dist_tokens"][0, -1, 0]) if text is None else text[0])
    steps: list[tuple[int, int]] = []
    while (num_left := max_new_tokens + len(prompt) - len(tokens)) > 0:
        batch = _batch(tokens, held)
        num = min(num_drafts, num_left - 1) if is_bounded else num_drafts
        drafts = trainable.draft(batch, num).tolist() if num else []
        held = target.run(torch.tensor([tokens + drafts]), TargetNeeds(True, needs.layers, needs.caches))
        greedy = held["dist_tokens"][0, len(tokens) - 1 :, 0].tolist()
        if text is not None:
            greedy = [*text[len(tokens) - len(prompt) :], *greedy][: len(greedy)]
        num = next((i for i, draft in enumerate(drafts) if draft != greedy[i]), len(drafts))
        steps.append((len(drafts), num))
        tokens += [*drafts[:num], greedy[num]]
        held = {name: first_nodes(name, value, len(tokens) - 1) for name, value in held.items()}
    return steps


def _batch(tokens: list[int], held: dict[str, torch.Tensor]) -> TrainingBatch:
    device = str(held["dist_tokens"].device)
    return batch_from_outputs(torch.tensor([tokens]), held, seed=0, device=device)
