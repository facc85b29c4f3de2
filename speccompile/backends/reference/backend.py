# SPDX-License-Identifier: Apache-2.0
"""The reference backend: neutral graphs run as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.core.jobs import BuildSizes, CompileOptions, WeightCounts
from speccompile.core.specs import GraphSpec, ModelDims
from speccompile.errors import RecipeError

if TYPE_CHECKING:
    import onnx_ir as ir

    from speccompile.backends.reference.engine import ReferenceEngine

GRAPH_FILE = "graph.onnx"


class ReferenceBackend:
    """See `speccompile.backends.onnxruntime.backend.OnnxRuntimeBackend`; same methods, nothing measured."""

    name = "reference"
    devices = ("cpu",)
    dtypes = ("float32",)
    quantizations = ("none",)
    graph_file = GRAPH_FILE
    keeps_logits = True

    def compile(
        self,
        model: ir.Model,
        spec: GraphSpec,
        dest: Path,
        *,
        quantization: str = "none",
        form: str | None = None,
        options: CompileOptions | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> dict[str, Any]:
        """Attach the tail and write `dest/graph.onnx`.

        Raises:
            RecipeError: a quantisation is asked for: the oracle computes in float32 alone.
        """
        from speccompile.backends.writing import lower_and_save
        from speccompile.passes.pipelines import reference_table

        del options
        if quantization != "none":
            raise RecipeError(
                "target.quantization", quantization, "none with engine.backend: reference", "Choose another backend."
            )
        report = lower_and_save(model, reference_table(spec), dest / GRAPH_FILE, progress)
        return {"form": "fp32", "forms_measured": {}, **report}

    def compile_rollback(self, dims: ModelDims, dest: Path, options: CompileOptions | None = None) -> GraphSpec:
        """Write the cache compaction graph; the engine itself uses the numpy twin."""
        from speccompile.backends.writing import save_rollback

        del options
        return save_rollback(dims, dest / GRAPH_FILE)

    def check(self, spec: GraphSpec, options: CompileOptions, quantization: str) -> None:
        """Refuse what cannot be compiled before anything is exported: nothing more than the recipe's own checks."""

    def predict(self, counts: WeightCounts, quantization: str, dtype: str) -> BuildSizes:
        """Sizes of a graph and the memory of its build: see `predict_float32`."""
        from speccompile.backends.predicting import predict_float32

        del dtype
        return predict_float32(counts, quantization)

    def depends_on(self, options: CompileOptions) -> dict[str, Any]:
        """What else a graph depends on: nothing."""
        del options
        return {}

    def why_unchecked(self) -> str | None:
        """Its graphs run everywhere: None."""
        return None

    def tune(self, path: Path, spec: GraphSpec, threads: int | None = None, others_bytes: int = 0) -> dict[str, Any]:
        """Nothing is measured: an empty record."""
        del path, spec, threads, others_bytes
        return {}

    def adapt_tuning(
        self,
        path: Path,
        spec: GraphSpec,
        tuning: Mapping[str, Any],
        threads: int | None = None,
        others_bytes: int = 0,
    ) -> dict[str, Any]:
        """The record as it is."""
        del path, spec, threads, others_bytes
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
        lenders: Mapping[str, Any] | None = None,
    ) -> ReferenceEngine:
        """Open an engine; `tuning`, `rollback` and `device` do not matter here."""
        from speccompile.backends.reference.engine import ReferenceEngine

        del tuning, rollback, device
        return ReferenceEngine(path, spec, max_slots, max_rows, lenders)
