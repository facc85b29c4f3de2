# SPDX-License-Identifier: Apache-2.0
"""The text over which a target's weights are quantised, as token ids."""

from __future__ import annotations

from pathlib import Path

from speccompile.backends.base import Backend
from speccompile.checkpoints.texts import Texts, tokens_from_file
from speccompile.core import registry
from speccompile.core.jobs import GraphJob
from speccompile.core.protocols import GraphSource
from speccompile.recipe.models import AUTO_TEXTS, NO_TEXTS
from speccompile.recipe.plan import TARGET, BuildPlan

MAX_TOKENS = 32768  # read of a file: more text takes longer and was not seen to help
MIN_TOKENS = 256
_KEY = "target.calibration"
_SHORT = f"Give more text, or {AUTO_TEXTS} to draw it from the model."


def calibration_of(plan: BuildPlan, job: GraphJob, source: GraphSource, backend: Backend) -> Texts | None:
    """Returns the calibration texts of a graph: empty to draw them from the model; None where weights are rounded.

    Weights are rounded with random weights, in drafts, and in a target whose draft shares its quantised weights.

    Args:
        plan: of the build.
        job: one of its jobs.
        source: of the job, with its checkpoint's folder and sizes.
        backend: that compiles it.

    Raises:
        RecipeError: the file cannot be read, or does not hold enough text.
        CheckpointError: the tokenizer cannot be read.
    """
    if job.name != TARGET or plan.weights != "checkpoint" or job.quantization not in backend.calibrates:
        return None
    if plan.calibration == NO_TEXTS or any(_shares_weights(draft, job) for draft in plan.drafts):
        return None
    if plan.calibration == AUTO_TEXTS:
        return ()
    return read_texts(Path(plan.calibration), source.folder, source.dims.vocab_size)


def _shares_weights(draft: GraphJob, target: GraphJob) -> bool:
    return bool(registry.find_class(draft.source).shares_weights) and draft.quantization == target.quantization


def read_texts(path: Path, folder: Path, vocab_size: int) -> Texts:
    """Returns the first `MAX_TOKENS` tokens of a file, `MIN_TOKENS` at least; see `texts.tokens_from_file`."""
    return tokens_from_file(_KEY, path, folder, vocab_size, (MIN_TOKENS, MAX_TOKENS), _SHORT)
