# SPDX-License-Identifier: Apache-2.0
"""The ONNX Runtime backend: compile, tune, load."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.core.jobs import BuildSizes, CompileOptions, WeightCounts
from speccompile.core.specs import GraphSpec, ModelDims

if TYPE_CHECKING:
    import onnx_ir as ir

    from speccompile.backends.onnxruntime.engine import OrtEngine

GRAPH_FILE = "graph.onnx"


class OnnxRuntimeBackend:
    """Neutral graphs in, ONNX Runtime engines out."""

    name = "onnxruntime"
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes = ("float32",)
    quantizations = ("none", "int8", "int4")
    graph_file = GRAPH_FILE
    # The target's logits as an output: 0.99 to 1.01 times the time of a step without (the example pair's target in
    # fp32 and int8, 1 to 64 slots, 1 to 16 nodes, interleaved), as they are computed anyhow.
    keeps_logits = True

    def for_device(self, device: str) -> OnnxRuntimeBackend:
        """The backend of that device: graphs are lowered, measured and loaded in another way on a GPU."""
        from speccompile.backends.onnxruntime.cuda_backend import OrtCudaBackend

        return self if device == "cpu" else OrtCudaBackend()

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
        """Lower `model` and write `dest/graph.onnx` with its external data.

        Where a quantisation has several kernel forms and none is named, each is lowered and measured, and the
        fastest is kept.

        Args:
            model: neutral graph from the frontend; left unchanged.
            spec: inputs and outputs that the lowered graph shall have.
            dest: folder to write to; made when missing.
            quantization: none, int8 or int4.
            form: a kernel form, see `speccompile.passes.pipelines.ORT_QUANTIZATION`.
            options: not read: sizes and profiles do not matter here.
            progress: called with the name of each pass.

        Returns:
            {"form", "forms_measured": {form: step_ms}, "passes": [...], "op_histogram": {"before", "after"}}.

        Raises:
            PassError, BuildError, RecipeError.
        """
        from speccompile.backends.onnxruntime.tune import measure_graph
        from speccompile.backends.writing import lower_and_save
        from speccompile.passes.pipelines import ORT_QUANTIZATION, onnxruntime_table

        del options
        forms = [form] if form else list(ORT_QUANTIZATION.get(quantization, {quantization: ()}))
        dest.mkdir(parents=True, exist_ok=True)
        reports, measured = {}, {}
        for name in forms:
            folder = dest if len(forms) == 1 else dest / name
            table = onnxruntime_table(spec, quantization, name)
            reports[name] = lower_and_save(model, table, folder / GRAPH_FILE, progress)
            if len(forms) > 1:
                if progress is not None:
                    progress(f"measure {name}")
                measured[name] = measure_graph(folder / GRAPH_FILE, spec)["step_ms"]
        best = min(measured, key=lambda n: measured[n]["1"] * measured[n]["4"]) if measured else forms[0]
        if measured:
            for file in (dest / best).iterdir():
                file.rename(dest / file.name)
            for name in forms:
                shutil.rmtree(dest / name)
        return {"form": best, "forms_measured": measured, **reports[best]}

    def compile_rollback(self, dims: ModelDims, dest: Path, options: CompileOptions | None = None) -> GraphSpec:
        """Write the cache compaction graph of a model to `dest/graph.onnx`; returns its spec."""
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
        """What else a compiled graph depends on: the machine, as kernel forms are chosen by measuring."""
        from speccompile.backends.onnxruntime.tune import cpu_name

        del options
        return {"machine": cpu_name()}

    def why_unchecked(self) -> str | None:
        """Why compiled graphs cannot run on the machine that builds them; None: they can, and are checked."""
        return None

    def tune(self, path: Path, spec: GraphSpec, threads: int | None = None, others_bytes: int = 0) -> dict[str, Any]:
        """Measure thread counts and step costs of a lowered graph: see `measure_graph`."""
        from speccompile.backends.onnxruntime.tune import measure_graph

        return measure_graph(path, spec, threads, others_bytes)

    def adapt_tuning(
        self,
        path: Path,
        spec: GraphSpec,
        tuning: Mapping[str, Any],
        threads: int | None = None,
        others_bytes: int = 0,
    ) -> dict[str, Any]:
        """The record for this machine: see `speccompile.backends.onnxruntime.tune.adapt_tuning`."""
        from speccompile.backends.onnxruntime.tune import adapt_tuning

        return adapt_tuning(path, spec, tuning, threads, others_bytes)

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
    ) -> OrtEngine:
        """Open an engine: see `speccompile.backends.onnxruntime.engine.load_engine`."""
        from speccompile.backends.onnxruntime.engine import load_engine

        del device
        sizes = {"max_slots": max_slots, "max_rows": max_rows}
        return load_engine(path, spec, **sizes, settings=tuning, rollback=rollback, lenders=lenders)
