# SPDX-License-Identifier: Apache-2.0
"""A target whose outputs come from the bundle that serves it: what a drafter reads, with the served weights' errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speccompile.bundle.format import MANIFEST
from speccompile.bundle.stage_cache import StageCache
from speccompile.core.specs import HIDDEN, LENGTHS, LOGITS, SCORED_NODES, SURE_NODES, TOKENS, hidden_name
from speccompile.errors import RecipeError
from speccompile.pipeline import build
from speccompile.recipe.models import Recipe, SpeculatorSection
from speccompile.recipe.plan import find_device, resolve
from speccompile.runtime.engine import load
from speccompile.training.target import Target, dist_from_logits
from speccompile.training_contract import TargetNeeds

_CHUNK = 64  # tokens of a step: their logits are in memory at once


class BundleTarget(Target):
    """A `Target` whose outputs in `needs` its bundle gives, which is built where it is not there.

    Raises:
        RecipeError: caches are needed, which bundles do not give.
        CheckpointError, BuildError: the target cannot be read, or its bundle not be built.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        recipe: Recipe,
        needs: TargetNeeds,
        max_seq_len: int,
        bundle: Path,
        progress: Callable[[str], None],
    ) -> None:
        super().__init__(folder, dtype)
        if needs.caches:
            todo = "Write training.outputs: weights, or train another method."
            raise RecipeError("training.outputs", "bundle, for a drafter that reads caches", "weights", todo)
        if not (bundle / MANIFEST).is_file():
            progress("target: build its bundle")
            build(_plan(recipe, needs, max_seq_len), bundle, cache=StageCache(None))
        self._engine, self.form = load(bundle).engines[0], bundle.name

    @torch.no_grad()
    def run(self, tokens: torch.Tensor, needs: TargetNeeds) -> dict[str, torch.Tensor]:
        rows = [self._row(row, needs) for row in tokens.cpu().numpy()]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, tokens: np.ndarray, needs: TargetNeeds) -> dict[str, torch.Tensor]:
        names = {f"layer.{i}": hidden_name(i) for i in needs.layers} | ({"hidden": HIDDEN} if needs.hidden else {})
        parts: list[dict[str, torch.Tensor]] = []
        size = min(_CHUNK, self._engine.max_scored or _CHUNK)
        for start in range(0, len(tokens), size):
            nodes = tokens[None, start : start + size].astype(np.int64)
            num = nodes.shape[1]
            feeds: dict[str, Any] = {TOKENS: nodes, LENGTHS: np.array([start]), SCORED_NODES: np.arange(num)[None]}
            if self._engine.states is not None:
                feeds[SURE_NODES] = np.array([num])
            outputs = self._engine.run(feeds)
            # Engines write into the same arrays in each step.
            held = {name: torch.from_numpy(np.array(outputs[own][0])) for name, own in names.items()}
            parts.append({**held, **dist_from_logits(torch.from_numpy(np.array(outputs[LOGITS][0])))})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _plan(recipe: Recipe, needs: TargetNeeds, max_seq_len: int) -> Any:
    sizes = {"max_batch_size": 1, "max_seq_len": max_seq_len, "max_draft_nodes": 1, "logits": True}
    engine = recipe.engine.model_copy(update=sizes)
    plain = recipe.model_copy(update={"engine": engine, "speculator": SpeculatorSection(method="none")})
    plan = resolve(plain, find_device(engine.device))
    options = replace(plan.target.options, hidden=needs.hidden, hidden_layers=needs.layers)
    return replace(plan, target=replace(plan.target, options=options))
