# SPDX-License-Identifier: Apache-2.0
"""The vision tower of the target's checkpoint, with its projection, as the source of a graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from speccompile.checkpoints.checkpoint import list_stored, read_config
from speccompile.checkpoints.folders import digests_from_checkpoint, find_folder
from speccompile.checkpoints.vision import VisionDims, check_vision, image_record, own_name, read_vision_dims
from speccompile.core.jobs import GraphJob, SourceContext, WeightCounts
from speccompile.core.specs import GraphSpec
from speccompile.errors import BuildError, CheckpointError
from speccompile.graph_kinds.decoder import IMAGE_EMBEDDING, PIXELS, vision_spec

if TYPE_CHECKING:
    import onnx_ir as ir

    from speccompile.core.protocols import Engine

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.gguf")


class VisionSource:
    """A `speccompile.core.protocols.GraphSource`."""

    role = "vision"
    max_rows = 0
    has_tokenizer = False
    shares_weights = needs_tables = False
    is_needed = True

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        assert context.target is not None
        self.job, self.context = job, context
        self.folder = find_folder(job, context.weights)
        check_vision(read_config(self.folder))
        self.dims: VisionDims = read_vision_dims(self.folder, context.target.hidden_size)
        self.record = image_record(self.folder, context.weights)

    def check(self) -> None:
        """Checks that there are weights of the tower and of its projection; the export compares names and shapes."""
        found = {own.partition(".")[0] for name in list_stored(self.folder) if (own := own_name(name)) is not None}
        if missing := {"tower", "projector"} - found:
            got = f"no weights of the vision {sorted(missing)[0]}"
            todo = "Download the whole checkpoint, or leave target.vision out."
            raise CheckpointError(str(self.folder), got, "a vision tower and its projection", todo)

    def digests(self) -> dict[str, str]:
        return digests_from_checkpoint(self.folder, self.context.weights, WEIGHT_FILES)

    def counts(self) -> WeightCounts:
        return self.dims.counts()

    def spec(self) -> GraphSpec:
        """Returns the spec: pixels in, rows in the target's embedding out."""
        return vision_spec(self.job.name, self.dims.image_size, self.dims.num_tokens, self.dims.hidden_size)

    def export(self, progress: Callable[[str], None]) -> tuple[ir.Model, VisionDims]:
        from speccompile.export.vision import export_vision

        model, num_params = export_vision(self.folder, self.spec(), self.context.weights, progress)
        return model, replace(self.dims, num_params=num_params)

    def check_compiled(self, engine: Engine, max_nodes: int) -> dict[str, Any]:
        pixels = np.sin(np.arange(np.prod(self._shape), dtype=np.float32)).reshape(self._shape)
        rows = np.asarray(engine.run({PIXELS: pixels})[IMAGE_EMBEDDING])
        if not np.isfinite(rows).all():
            todo = "The compiled graph is wrong: report it with the model's config.json."
            raise BuildError(f"check {engine.spec.name}", "rows that are not finite", "numbers", todo)
        return {"num_tokens": int(rows.shape[1])}

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(int(d) for d in self.spec().input(PIXELS).dims)
