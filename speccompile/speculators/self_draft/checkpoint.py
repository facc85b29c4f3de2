# SPDX-License-Identifier: Apache-2.0
"""The target as the source of its own draft: all of its layers, or some of them. Needs no torch before the export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from speccompile.checkpoints.folders import weight_files
from speccompile.checkpoints.tensor_files import has_grids
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.errors import RecipeError
from speccompile.export.target_layers import TargetLayersSource
from speccompile.speculators.self_draft.config import SelfDraftOptions

DEFAULT_GAIN = 1.1
MIN_BYTES = 100_000_000  # of a target's files: fewer may stay in a CPU's caches, where 4 bits are hardly faster


def section_for_target(folder: Path) -> dict[str, Any] | None:
    """See `Method.default_section`: where its weights are floats of `MIN_BYTES` or more."""
    is_large = sum(file.stat().st_size for file in weight_files(folder)) >= MIN_BYTES
    return {"min_gain": DEFAULT_GAIN} if is_large and not has_grids(folder) else None


class SelfDraftSource(TargetLayersSource):
    """A `speccompile.core.protocols.GraphSource`. The job has `SelfDraftOptions`."""

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        options: SelfDraftOptions = job.options
        self.layers = self._layers(options.num_layers)
        self.dims = replace(self.of_target.kept(self.layers), num_params=0)
        assert context.target_job is not None
        if len(self.layers) == self.of_target.num_layers and job.quantization == context.target_job.quantization:
            got, expected = (
                f"{job.quantization} with all layers, as the target",
                "a draft that is cheaper than the target",
            )
            todo = "Choose fewer bits, set speculator.num_layers, or choose another method."
            raise RecipeError("speculator.quantization", got, expected, todo)

    def _layers(self, num: int | str) -> tuple[int, ...]:
        target = self.of_target
        if num == "all" or num == target.num_layers:
            return tuple(range(target.num_layers))
        if int(num) > target.num_layers:
            expected = f"all, or 2 to {target.num_layers}, the layers of the target"
            raise RecipeError("speculator.num_layers", f"{num}", expected, "Lower it.")
        if target.recurrent_layers or target.sources:
            what = "recurrent layers" if target.recurrent_layers else "layers that read caches of other layers"
            expected = f"all: the target has {what}"
            raise RecipeError("speculator.num_layers", f"{num}", expected, "Leave speculator.num_layers out.")
        return spread(target.num_layers, int(num))


def spread(num_layers: int, num: int) -> tuple[int, ...]:
    """Returns `num` of the layers, at least 2: those left out are spread evenly between the first and the last one."""
    num_out, num_inner = num_layers - num, num_layers - 2
    out = {1 + (2 * index + 1) * num_inner // (2 * num_out) for index in range(num_out)}
    return tuple(layer for layer in range(num_layers) if layer not in out)
