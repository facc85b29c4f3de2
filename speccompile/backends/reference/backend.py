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
    kv_caches = ("auto", "int8")
    graph_file = GRAPH_FILE
    graph_sources = ("backends/reference/backend", "backends/writing")
    keeps_logits = True
    state_trees = True
    slides_caches = True

    def compile(self, job: CompileJob) -> dict[str, Any]:
        from speccompile.backends.writing import compiled_spec, has_int8_caches, lower_and_save
        from speccompile.passes.pipelines import reference_table

        if job.quantization not in self.quantizations:
            expected = f"{' or '.join(self.quantizations)} with engine.backend: reference"
            raise RecipeError("target.quantization", job.quantization, expected, "Choose another backend.")
        table = reference_table(job.spec, int8_caches=has_int8_caches(job.options))
        report = lower_and_save(job.model, table, job.dest / GRAPH_FILE, job.progress)
        return {"form": "fp32", "forms_measured": {}, **compiled_spec(job.spec, job.options), **report}

    def compile_rollback(self, dims: ModelDims, dest: Path, options: CompileOptions | None = None) -> GraphSpec:
        from speccompile.backends.writing import save_rollback

        return save_rollback(dims, dest / GRAPH_FILE, options)

    def load(self, job: LoadJob) -> ReferenceEngine:
        from speccompile.backends.reference.engine import ReferenceEngine

        return ReferenceEngine(job)
