# SPDX-License-Identifier: Apache-2.0
"""The reference backend: neutral graphs run unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.backends.base import Backend, CompileJob, LoadJob
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CompileOptions
from speccompile.core.specs import GraphSpec
from speccompile.errors import RecipeError

if TYPE_CHECKING:
    from speccompile.backends.reference.engine import ReferenceEngine

GRAPH_FILE = "graph.onnx"


class ReferenceBackend(Backend):
    """The oracle: graphs are not lowered, and nothing is measured."""

    name = "reference"
    quantizations = ("none", "stored")
    graph_file = GRAPH_FILE
    graph_sources = ("backends/reference/backend", "backends/writing")
    keeps_logits = True
    state_trees = True
    slides_caches = True

    def compile(self, job: CompileJob) -> dict[str, Any]:
        from speccompile.backends.writing import lower_and_save
        from speccompile.passes.pipelines import reference_table

        if job.quantization not in self.quantizations:
            expected = f"{' or '.join(self.quantizations)} with engine.backend: reference"
            raise RecipeError("target.quantization", job.quantization, expected, "Choose another backend.")
        report = lower_and_save(job.model, reference_table(job.spec), job.dest / GRAPH_FILE, job.progress)
        return {"form": "fp32", "forms_measured": {}, **report}

    def compile_rollback(self, dims: ModelDims, dest: Path, options: CompileOptions | None = None) -> GraphSpec:
        from speccompile.backends.writing import save_rollback

        del options
        return save_rollback(dims, dest / GRAPH_FILE)

    def load(self, job: LoadJob) -> ReferenceEngine:
        from speccompile.backends.reference.engine import ReferenceEngine

        return ReferenceEngine(job)
