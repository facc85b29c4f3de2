# SPDX-License-Identifier: Apache-2.0
"""The ONNX Runtime backend: compile, tune, load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from speccompile.backends.base import Backend, CompileJob, LoadJob, predict_float32
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import BuildSizes, CompileOptions, WeightCounts
from speccompile.core.specs import NEXT_TOKEN, GraphSpec
from speccompile.errors import BuildError

if TYPE_CHECKING:
    from speccompile.backends.onnxruntime.engine import OrtEngine

GRAPH_FILE = "graph.onnx"
_CUDA = "speccompile.backends.onnxruntime.cuda_backend:OrtCudaBackend"


class OnnxRuntimeBackend(Backend):
    """Neutral graphs in, ONNX Runtime engines out."""

    name = "onnxruntime"
    devices: tuple[str, ...] = ("cpu", "cuda")
    quantizations: tuple[str, ...] = ("none", "bf16", "int8", "int4", "stored", "auto")
    kv_caches: tuple[str, ...] = ("auto", "int8")
    # Drafts change the time alone. Six int4 drafters with chains of a fixed length and an int8 target had 0.97 to 1.02
    # times the acceptance length of int8 ones and 0.99 to 1.14 times the speed (docs/lab/2026-11-26-kernels.md).
    draft_quantizations: Mapping[str, str] = MappingProxyType(dict.fromkeys(("int8", "int4", "stored", "auto"), "int4"))
    calibrates: tuple[str, ...] = ("int4",)
    graph_file = GRAPH_FILE
    graph_sources: tuple[str, ...] = (
        *("backends/onnxruntime/backend", "backends/onnxruntime/forms", "backends/onnxruntime/calibration"),
        *("backends/distance", "backends/onnxruntime/fidelity", "backends/onnxruntime/answers"),
        *("backends/onnxruntime/tune", "backends/measuring", "backends/writing"),
    )
    # The target's logits as an output: 0.99 to 1.01 times the time of a step without (the example pair's target in
    # fp32 and int8, 1 to 64 slots, 1 to 16 nodes, interleaved), as they are computed anyway.
    keeps_logits = True
    state_trees = True
    slides_caches = True
    # On a GPU graphs are lowered, measured and loaded differently.
    device_variants: Mapping[str, str] = MappingProxyType({"cuda": _CUDA})

    def check(self, spec: GraphSpec, options: CompileOptions, quantization: str) -> None:
        from speccompile.backends.onnxruntime.kernel_library import find_library

        del spec, options
        if quantization == "bf16" and find_library() is None:
            got, todo = (
                "no CPU kernels",
                "Install a C++ compiler (docs/explanation/kernels.md), or choose none or int8.",
            )
            raise BuildError("quantization: bf16", got, "the CPU kernels of this package", todo)

    def compile(self, job: CompileJob) -> dict[str, Any]:
        """Lowers a model and writes `graph.onnx` with its external data.

        Where a quantisation has several kernel forms and none is named, all are measured: the fastest of those close
        enough to float32 is kept (`fidelity.near_forms`). With `auto` the forms of all quantisations are.

        Returns:
            {"form", "quantization", "forms_measured": {form: step_ms}, "form_distances": {form: `Distance`},
            "kernels_in_sequences", "passes": [...], "op_histogram": {"before", "after"}}; with calibration also
            "calibration" and "peak_rss_bytes", of stored weights "weights": see `StoredRows.record`.
        """
        from speccompile.backends.onnxruntime.forms import compile_best, forms_of, measure_int8_caches
        from speccompile.backends.onnxruntime.sequences import write_sequences
        from speccompile.backends.writing import compiled_spec, has_int8_caches, lower_and_save
        from speccompile.passes.expert_products import expert_products
        from speccompile.passes.pipelines import onnxruntime_table
        from speccompile.passes.stored_rows import shared_rows, stored_rows

        forms = forms_of(job.quantization, job.form, has_experts=any(expert_products(job.model)))
        sample = None if job.options is None else job.options.sample
        is_target = any(t.name == NEXT_TOKEN for t in job.spec.outputs)
        path = job.dest / GRAPH_FILE
        job.dest.mkdir(parents=True, exist_ok=True)
        is_calibrated = is_target and sample is not None and any(f.is_calibrated for f in forms)
        int8_caches = has_int8_caches(job.options)
        if len(forms) > 1 or is_calibrated:
            best = compile_best(job, path, forms, sample if is_target else None)
            return {**best, "kernels_in_sequences": write_sequences(path)}
        rows = stored_rows(job.quantization, job.options)
        shared = shared_rows(job.quantization, job.options)
        kind = (forms[0].quantization, forms[0].kernel)
        table = onnxruntime_table(job.spec, *kind, rows or shared, int8_caches=int8_caches)
        report = lower_and_save(job.model, table, path, job.progress)
        report |= {} if rows is None else {"weights": rows.record()}
        report |= compiled_spec(job.spec, job.options)
        if int8_caches and is_target and sample is not None:
            report |= measure_int8_caches(job, kind, rows or shared, sample)
        chosen = {"form": forms[0].name, "quantization": forms[0].quantization}
        sequences = {"kernels_in_sequences": write_sequences(path)}
        return {**chosen, "forms_measured": {}, "form_distances": {}, **sequences, **report}

    def compile_rollback(self, dims: ModelDims, dest: Path, options: CompileOptions | None = None) -> GraphSpec:
        from speccompile.backends.writing import save_rollback

        return save_rollback(dims, dest / GRAPH_FILE, options)

    def is_ready(self) -> bool:
        from speccompile.backends.onnxruntime.kernel_library import is_compiled

        return is_compiled()

    def prepare(self, *, wait: bool = True) -> None:
        from speccompile.backends.onnxruntime.kernel_library import begin_search

        found = begin_search()
        if wait:
            found.result()

    def predict(self, counts: WeightCounts, quantization: str, dtype: str) -> BuildSizes:
        del dtype
        return predict_float32(counts, quantization, ties=True)

    def depends_on(self, options: CompileOptions) -> dict[str, Any]:
        from speccompile.backends.onnxruntime.kernel_library import find_library
        from speccompile.backends.onnxruntime.tune import cpu_name

        del options
        library = find_library()
        return {"machine": cpu_name(), "cpu_kernels": None if library is None else library.stem}

    def tune(self, job: LoadJob) -> dict[str, Any]:
        from speccompile.backends.onnxruntime.tune import measure_graph

        return measure_graph(job)

    def adapt_tuning(self, job: LoadJob) -> dict[str, Any]:
        from speccompile.backends.onnxruntime.tune import adapt_tuning

        return adapt_tuning(job)

    def load(self, job: LoadJob) -> OrtEngine:
        from speccompile.backends.onnxruntime.engine import load_engine

        return load_engine(job)
