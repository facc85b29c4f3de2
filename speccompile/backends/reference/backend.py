# SPDX-License-Identifier: Apache-2.0
"""The reference backend: neutral graphs run as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.core.specs import GraphSpec, ModelDims, rollback_spec
from speccompile.errors import RecipeError

if TYPE_CHECKING:
    import onnx_ir as ir

    from speccompile.backends.reference.engine import ReferenceEngine

GRAPH_FILE = "graph.onnx"


class ReferenceBackend:
    """See `speccompile.backends.onnxruntime.backend.OnnxRuntimeBackend`; same methods, nothing measured."""

    name = "reference"
    devices = ("cpu",)

    def compile(
        self,
        model: ir.Model,
        spec: GraphSpec,
        dest: Path,
        *,
        quantization: str = "none",
        form: str | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> dict[str, Any]:
        """Attach the tail and write `dest/graph.onnx`.

        Raises:
            RecipeError: a quantisation is asked for: the oracle computes in float32 alone.
        """
        from speccompile.ops.registry import attach_functions
        from speccompile.passes.base import histogram_from_model, run_pipeline
        from speccompile.passes.pipelines import reference_table
        from speccompile.passes.save import save_model

        if quantization != "none":
            raise RecipeError(
                "target.quantization", quantization, "none with engine.backend: reference", "Choose another backend."
            )
        work = model.clone()
        before = histogram_from_model(work)
        traces = run_pipeline(work, reference_table(spec), progress)
        after = histogram_from_model(work)
        attach_functions(work)
        save_model(work, dest / GRAPH_FILE)
        passes = [trace.json_from_trace() for trace in traces]
        return {
            "form": "fp32",
            "forms_measured": {},
            "passes": passes,
            "op_histogram": {"before": before, "after": after},
        }

    def compile_rollback(self, dims: ModelDims, dest: Path) -> GraphSpec:
        """Write the cache compaction graph; the engine itself uses the numpy twin."""
        from speccompile.ops.registry import attach_functions
        from speccompile.passes.rollback import build_rollback
        from speccompile.passes.save import save_model

        spec = rollback_spec(dims)
        model = build_rollback(spec)
        attach_functions(model)
        save_model(model, dest / GRAPH_FILE)
        return spec

    def tune(self, path: Path, spec: GraphSpec, threads: int | None = None) -> dict[str, Any]:
        """Nothing is measured: an empty record."""
        del path, spec, threads
        return {}

    def adapt_tuning(
        self, path: Path, spec: GraphSpec, tuning: Mapping[str, Any], threads: int | None = None
    ) -> dict[str, Any]:
        """The record as it is."""
        del path, spec, threads
        return dict(tuning)

    def load(
        self,
        path: Path,
        spec: GraphSpec,
        *,
        max_slots: int,
        max_rows: int,
        tuning: Mapping[str, Any],
        rollback: Path | None = None,
        device: str = "cpu",
    ) -> ReferenceEngine:
        """Open an engine; `tuning`, `rollback` and `device` do not matter here."""
        from speccompile.backends.reference.engine import ReferenceEngine

        del tuning, rollback, device
        return ReferenceEngine(path, spec, max_slots, max_rows)
