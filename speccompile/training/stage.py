# SPDX-License-Identifier: Apache-2.0
"""One stage of training: batches in a fixed order, AdamW with a cosine schedule, measurements, checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from speccompile.recipe.training import GeneratedSection, PlainSection
from speccompile.training.distributed import Team
from speccompile.training.joint import NoStates
from speccompile.training.states import CachedStates, LiveStates, batch_from_outputs
from speccompile.training.windows import HELD_OUT, TRAIN, Windows
from speccompile.training_contract import TrainingBatch

MEASURE_ROWS = {"cpu": 8, "cuda": 64}  # windows of a measurement's batch
_SORTED_STEPS = 8


@dataclass(frozen=True)
class Stage:
    """Text, target outputs and schedule of a stage."""

    name: str
    section: PlainSection | GeneratedSection
    windows: Windows
    states: LiveStates | CachedStates | NoStates
    seed: int
    device: str = "cpu"

    def rows(self, step: int) -> list[int]:
        """Returns the windows of a step: each epoch reads all once, in its own order, neighbours by length."""
        count, size = self.windows.counts[TRAIN], self.section.batch_size
        group, at = divmod(step, _SORTED_STEPS)
        rows = []
        for index in range(group * _SORTED_STEPS * size, (group + 1) * _SORTED_STEPS * size):
            epoch, offset = divmod(index, count)
            rows.append(int(_order(count, self.seed, epoch)[offset]))
        rows.sort(key=lambda row: int(self._lengths[row]))
        return rows[at * size : (at + 1) * size]

    @cached_property
    def _lengths(self) -> np.ndarray:
        return self.windows.lengths(TRAIN)

    def batch(self, split: str, rows: list[int], seed: int) -> TrainingBatch:
        """Returns windows with the target's outputs, cut after the last label of the longest."""
        held = self.windows.rows(split, rows).trimmed()
        outputs = self.states.read(split, rows, held.tokens)
        tokens, is_label = torch.from_numpy(held.tokens.astype(np.int64)), torch.from_numpy(held.is_label)
        return batch_from_outputs(tokens, outputs, seed, self.device, is_label)


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def learning_rate(section: PlainSection | GeneratedSection, step: int) -> float:
    """Returns the rate of a step: linear warm-up, then a cosine to a tenth."""
    top = section.learning_rate
    if step < section.warmup_steps:
        return top * (step + 1) / section.warmup_steps
    done = (step - section.warmup_steps) / max(1, section.steps - section.warmup_steps)
    return top * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def make_optimizer(module: torch.nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """Returns AdamW without weight decay on norms and biases."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)


class StageRunner:
    """Runs steps of a stage with a module and its loss, sharded over the team, in the dtype `precision`."""

    def __init__(
        self,
        stage: Stage,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        team: Team,
        precision: torch.dtype,
        max_grad_norm: float,
    ) -> None:
        self.stage, self.module, self.optimizer, self.team = stage, module, optimizer, team
        self.precision, self.max_grad_norm = precision, max_grad_norm

    def step(self, step: int) -> torch.Tensor:
        """Runs one step; returns the measures of its batch over all processes, [7, positions] float64."""
        rows = self.stage.rows(step)
        batch = self.stage.batch(TRAIN, self.team.part(rows), seed=hash((self.stage.seed, step, self.team.rank)))
        rate = learning_rate(self.stage.section, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self.team.device, self.precision, enabled=self.precision != torch.float32):
            loss, sums = self.module(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.team.total(sums)

    @torch.no_grad()
    def measure(self) -> torch.Tensor:
        """Returns the measures of all held-out windows, [7, positions] float64."""
        count = self.stage.windows.counts[HELD_OUT]
        total = None
        size = MEASURE_ROWS[self.team.device] * self.team.size
        for start in range(0, count, size):
            rows = list(range(start, min(count, start + size)))
            # Every process takes part in every forward, even where it has no rows of its own.
            own = self.team.part(rows)
            share, rows = float(bool(own)), own or rows[:1]
            with torch.autocast(self.team.device, self.precision, enabled=self.precision != torch.float32):
                _, sums = self.module(self.stage.batch(HELD_OUT, rows, seed=start))
            total = sums * share if total is None else total + sums * share
        assert total is not None
        return self.team.total(total)


def measures_from_sums(sums: torch.Tensor) -> dict[str, Any]:
    """Returns measures by position and the estimated acceptance lengths, greedy and at temperature 1, JSON-ready."""
    losses, hits, tried, kept, chains, alphas, reached, *joint = sums.cpu()  # one wait for the device, not one a figure
    tried, chains = tried.clamp(min=1), chains.clamp(min=1)
    kept_share = (kept / chains).tolist()
    return {
        "loss": [round(v, 5) for v in (losses / tried).tolist()],
        "agreement": [round(v, 5) for v in (hits / tried).tolist()],
        "kept": [round(v, 5) for v in kept_share],
        "acceptance_length": round(1.0 + sum(kept_share), 5),
        "acceptance": [round(v, 5) for v in (alphas / tried).tolist()],
        "sampled_length": round(1.0 + float((reached / chains).sum()), 5),
        **_cost_of_joint(*(float(row[0]) for row in joint)),
    }


def _cost_of_joint(kl: float = 0.0, base: float = 0.0, changed: float = 0.0, count: float = 0.0) -> dict[str, float]:
    if not count:
        return {}
    perplexities = {"base_perplexity": base, "perplexity": changed}
    # An exponential that is too large is inf in torch, and an error in math.
    shown = {n: round(torch.tensor(v / count, dtype=torch.float64).exp().item(), 4) for n, v in perplexities.items()}
    return {"kl": round(kl / count, 6), **shown}
