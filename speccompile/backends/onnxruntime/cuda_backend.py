# SPDX-License-Identifier: Apache-2.0
"""The ONNX Runtime backend where `engine.device` is cuda."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from speccompile.backends.base import CompileJob, LoadJob, predict_float32
from speccompile.backends.machine import gpu_memory
from speccompile.backends.onnxruntime.backend import GRAPH_FILE, OnnxRuntimeBackend
from speccompile.common.extras import install_command
from speccompile.core.jobs import BuildSizes, CompileOptions, WeightCounts
from speccompile.core.specs import GraphSpec
from speccompile.errors import BuildError, RecipeError, RuntimeFault

if TYPE_CHECKING:
    from speccompile.backends.onnxruntime.cuda_engine import OrtCudaEngine

_FORMS = {"none": "fp32", "int8": "blocks32", "int4": "blocks32", "stored": "blocks"}  # those with CUDA kernels
_NO_GPU = "no CUDA device: lowered on a machine without one, not run"
_NO_PACKAGE = "no package cuda-python: lowered on a machine without it, not run"
_NO_PROVIDER = "an onnxruntime without CUDA: lowered, not run"


def _has_provider() -> bool:
    if find_spec("onnxruntime") is None:
        return False
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


class OrtCudaBackend(OnnxRuntimeBackend):
    """Branch-free bodies, shapes kept on the device, CUDA graphs; see `OnnxRuntimeBackend`."""

    devices = ("cuda",)
    quantizations = ("none", "int8", "int4", "stored")
    draft_quantizations: Mapping[str, str] = MappingProxyType({})  # not measured on a GPU
    kv_caches = ("auto",)
    calibrates = ()  # int4 weights are rounded: a large target would read its text on the CPU
    graph_sources = (*("backends/onnxruntime/backend", "backends/onnxruntime/cuda_backend", "backends/writing"),)
    state_copies = 3  # two buffers and a snapshot
    state_trees = False  # the bodies without branches follow chains
    slides_caches = False
    keeps_logits = False  # the cost of an output on a GPU was not measured

    def compile(self, job: CompileJob) -> dict[str, Any]:
        from speccompile.backends.writing import lower_and_save
        from speccompile.passes.pipelines import ORT_CUDA_FINISH, onnxruntime_table
        from speccompile.passes.stored_rows import stored_rows

        form = job.form or _FORMS.get(job.quantization, job.quantization)
        if form not in _FORMS.values():
            expected = f"one of {', '.join(sorted(set(_FORMS.values())))} with engine.device: cuda"
            raise RecipeError("quantization", f"{job.quantization}/{form}", expected, "Choose one of these.")
        # The packed experts' bodies have ops without CUDA kernels.
        rows = stored_rows(job.quantization, job.options)
        table = onnxruntime_table(job.spec, job.quantization, form, rows, packs_experts=False)
        nodes, path = (job.options or CompileOptions(max_nodes=17)).max_nodes, job.dest / GRAPH_FILE
        report = lower_and_save(job.model, table, path, job.progress, "tensorrt", nodes, ORT_CUDA_FINISH)
        return {"form": form, "forms_measured": {}, **report, **({} if rows is None else {"weights": rows.record()})}

    def check(self, spec: GraphSpec, options: CompileOptions, quantization: str) -> None:
        from speccompile.backends.cuda.kv_caches import refuse_states_alone

        super().check(spec, options, quantization)
        refuse_states_alone(spec)
        if self.why_unchecked() == _NO_PROVIDER:
            todo = f"Run: pip uninstall onnxruntime, then {install_command('ort-gpu')}."
            raise BuildError("engine.device cuda", "an onnxruntime without CUDA", "onnxruntime-gpu", todo)

    def predict(self, counts: WeightCounts, quantization: str, dtype: str) -> BuildSizes:
        del dtype
        return predict_float32(counts, quantization, packs_experts=False)

    def depends_on(self, options: CompileOptions) -> dict[str, Any]:
        return {"max_nodes": options.max_nodes}

    def why_unchecked(self, file: Path | None = None) -> str | None:
        from speccompile.backends.cuda.device import load_cuda, open_device

        del file
        try:
            load_cuda()
        except RuntimeFault:
            return _NO_PACKAGE
        try:
            device = open_device(0)
        except RuntimeFault as fault:  # with a GPU, its driver may be too old
            return _NO_GPU if gpu_memory() is None else f"{fault.got}: lowered, not run"
        if not _has_provider():
            return _NO_PROVIDER
        from speccompile.backends.onnxruntime.cuda_session import find_missing_kernels

        missing = find_missing_kernels(device)
        return None if missing is None else f"{missing}: lowered, not run"

    def tune(self, job: LoadJob) -> dict[str, Any]:
        from speccompile.backends.cuda.device import open_device
        from speccompile.backends.measuring import measure_steps, measured_sizes

        why = self.why_unchecked()
        if why is not None:
            return {"measured": False, "why": why}
        slots, rows = measured_sizes(job.spec)
        engine = self.load(replace(job, max_slots=slots, max_rows=rows, tuning={}))
        return {"measured": True, "gpu": open_device(0).properties()["name"], "step_ms": measure_steps(engine)}

    def adapt_tuning(self, job: LoadJob) -> dict[str, Any]:
        import onnxruntime

        from speccompile.backends.cuda.device import open_device
        from speccompile.backends.measuring import digest_of, measured_once

        if self.why_unchecked() is not None:
            return dict(job.tuning)  # loading will report what is missing
        gpu = open_device(0).properties()["name"]
        if job.tuning.get("gpu") == gpu:
            return dict(job.tuning)
        return {
            **job.tuning,
            **measured_once(partial(self.tune, job), digest_of(job.path), gpu, onnxruntime.__version__),
        }

    def load(self, job: LoadJob) -> OrtCudaEngine:  # type: ignore[override]
        from speccompile.backends.onnxruntime.cuda_engine import load_cuda_engine

        return load_cuda_engine(job)
