# SPDX-License-Identifier: Apache-2.0
"""What a plan leaves open until its checkpoints are known: the dtype, and whether quantised weights are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from speccompile.backends.base import Backend
from speccompile.checkpoints.checkpoint import read_config, read_text_config
from speccompile.checkpoints.folders import find_config
from speccompile.checkpoints.safetensors import read_header
from speccompile.checkpoints.tensor_files import has_grids
from speccompile.core import registry
from speccompile.core.jobs import STORED, GraphJob
from speccompile.recipe.plan import AUTO, BuildPlan


def complete_plan(plan: BuildPlan) -> BuildPlan:
    """Returns the plan with all that it left open; a complete one is returned as it is.

    Raises:
        CheckpointError: the target has no config.
    """
    return choose_stored(choose_dtype(plan))


def choose_stored(plan: BuildPlan) -> BuildPlan:
    """Returns the plan with weights as they are stored, in graphs whose quantisation is `auto` and that have such.

    Raises:
        CheckpointError: a checkpoint cannot be read.
    """
    backend: Backend = registry.backend(plan.engine.backend, plan.engine.device)
    if plan.weights != "checkpoint" or STORED not in backend.quantizations:
        return plan
    target = _stored(plan.target) if plan.target.quantization == AUTO else plan.target
    drafts = [_stored(job) if job.name in plan.open_drafts else job for job in plan.drafts]
    return replace(plan, target=target, drafts=tuple(drafts), open_drafts=())


def _stored(job: GraphJob) -> GraphJob:
    return replace(job, quantization=STORED) if has_grids(find_config(job)) else job


def choose_dtype(plan: BuildPlan) -> BuildPlan:
    """Returns the plan with the dtype that its backend chooses for the target's checkpoint, where it was left open.

    Raises:
        CheckpointError: the target has no config.
    """
    if not plan.chooses_dtype:
        return plan
    folder = find_config(plan.target)
    config = read_text_config(folder)
    backend: Backend = registry.backend(plan.engine.backend, plan.engine.device)
    dtype = backend.choose_dtype(_stored_dtype(folder, config), str(config.get("model_type")), plan.engine.options)
    return replace(plan, dtype=dtype, chooses_dtype=False)


def _stored_dtype(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the dtype that a checkpoint's config names, else that of most tensors of its first file."""
    for held in (config, read_config(folder)):
        for name in ("dtype", "torch_dtype"):
            if isinstance(held.get(name), str):
                return str(held[name]).removeprefix("torch.")
    for file in sorted(folder.glob("*.safetensors"))[:1]:
        counts = Counter(tensor.dtype for tensor in read_header(file).values())
        return {"F16": "float16", "BF16": "bfloat16"}.get(counts.most_common(1)[0][0]) if counts else None
    return None
