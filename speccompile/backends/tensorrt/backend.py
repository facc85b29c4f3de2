# SPDX-License-Identifier: Apache-2.0
"""The TensorRT backend: compile to plans, load them on a GPU. Building with TensorRT-RTX needs none."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.backends.base import Backend, CompileJob, LoadJob
from speccompile.backends.tensorrt.config import Config, config_from_options
from speccompile.backends.tensorrt.specs import ADDRESS_BYTES, misaligned_states, tensorrt_spec
from speccompile.core import specs
from speccompile.core.dims import DTYPE_BYTES, ModelDims
from speccompile.core.jobs import STORED, BuildSizes, CompileOptions, WeightCounts
from speccompile.core.specs import GraphSpec
from speccompile.errors import BuildError, RuntimeFault
from speccompile.graph_kinds.decoder import rollback_spec

if TYPE_CHECKING:
    import onnx_ir as ir

    from speccompile.backends.tensorrt.engine import TrtEngine


_log = logging.getLogger(__name__)
PLAN_FILE = "graph.plan"
LOWERED_FILE = "lowered.onnx"
_BFLOAT16_FROM = (8, 0)
# Families whose authors published checkpoints in float16; others may exceed its range in activations, as Gemma 3 does.
_HOLD_FLOAT16 = frozenset({"codegen", "gpt_neox", "gptj", "llama", "opt", "phi"})
_NO_GPU = "no CUDA device: built on a machine without one, not run"


class TensorRTBackend(Backend):
    """Neutral graphs in, plans and engines out."""

    name = "tensorrt"
    Config = Config
    devices = ("cuda",)
    dtypes = ("float16", "bfloat16")
    quantizations = ("none", "int8", "int4", "fp8", "stored")
    graph_file = PLAN_FILE
    # All of the folder except what runs plans: a change of an engine does not change plans.
    graph_sources = (
        "backends/writing",
        *(
            f"backends/tensorrt/{name}"
            for name in ("backend", "build_child", "builder", "config", "variants", "kernels")
        ),
        *(f"backends/tensorrt/{name}" for name in ("launches", "network", "plugin_names", "plugins", "profiles")),
        *(f"backends/tensorrt/{name}" for name in ("records", "settings", "import_helper", "specs")),
    )
    state_copies = 3  # two buffers and a snapshot
    runs_code_on_load = True  # a plan may carry a library, whose constructors run when it is deserialised

    def choose_dtype(self, stored: str | None, model_type: str, options: Any) -> str:
        from speccompile.backends.tensorrt.import_helper import find_compute_capabilities

        named = [tuple(map(int, str(text).split("."))) for text in options.compute_capabilities]
        is_old = any(pair < _BFLOAT16_FROM for pair in named or find_compute_capabilities())
        holds = stored == "float16" or (stored != "bfloat16" and model_type in _HOLD_FLOAT16)
        if is_old and not holds:
            _log.warning(
                "GPUs before 8.0 have no bfloat16: %s is built in float16, whose range it may exceed", model_type
            )
        return "float16" if is_old or holds else "bfloat16"

    def compile(self, job: CompileJob) -> dict[str, Any]:
        """Lowers a model and builds `graph.plan`, with its record beside it.

        Returns:
            {"form", "forms_measured": {}, "passes", "op_histogram", "spec": TensorRT's own, "tensorrt": see
            `records.make_record`, "peak_rss_bytes": of both processes}.
        """
        from speccompile.backends.tensorrt.plugin_names import PLUGIN_OPS
        from speccompile.backends.writing import lower_and_save
        from speccompile.passes.pipelines import tensorrt_table
        from speccompile.passes.stored_rows import stored_rows

        spec, dest, quantization = job.spec, job.dest, job.quantization
        options = job.options or CompileOptions("float16", max_rows=spec.max_rows)
        config = config_from_options(options)
        plugins = PLUGIN_OPS if config.has_plugins else ()
        own = tensorrt_spec(spec, options.dtype, options.max_rows, compacts=_compacts(spec) and bool(plugins))
        rows = stored_rows(quantization, options)
        table = tensorrt_table(own, quantization, dtype=options.dtype, plugins=plugins, rows=rows)
        source = dest / LOWERED_FILE
        report = lower_and_save(job.model, table, source, job.progress, "tensorrt", options.max_nodes)
        if options.consumes_model:
            _release(job.model)
        used = [op for op in plugins if f"speccompile::{op}" in report["op_histogram"]["after"]]
        record = self._build(replace(job, spec=own, options=options), options, used)
        return {
            "form": options.dtype if quantization == "none" else f"{options.dtype} {quantization}",
            "forms_measured": {},
            **report,
            **({} if rows is None else {"weights": rows.record()}),
            "spec": own.json_from_spec(),
            "tensorrt": record,
            "peak_rss_bytes": record["build"]["peak_rss_bytes"] + record["build"]["parent_rss_bytes"],
        }

    def compile_rollback(self, dims: ModelDims, dest: Path, options: CompileOptions | None = None) -> GraphSpec:
        from speccompile.backends.tensorrt.plugin_names import KV_ROLLBACK
        from speccompile.ops.registry import attach_functions
        from speccompile.passes.rollback import build_rollback
        from speccompile.passes.save import save_model

        options = options or CompileOptions("float16", max_rows=dims.max_positions)
        own = tensorrt_spec(rollback_spec(dims), options.dtype, options.max_rows)
        plugins = [KV_ROLLBACK] if config_from_options(options).has_plugins else []
        model = build_rollback(own, joined=bool(plugins))
        if not plugins:
            attach_functions(model, "tensorrt", options.max_nodes)
        save_model(model, dest / LOWERED_FILE)
        self._build(CompileJob(model, own, dest), options, plugins)
        return own

    def _build(self, job: CompileJob, options: CompileOptions, plugins: list[str]) -> dict[str, Any]:
        """Builds the plan of `LOWERED_FILE`; returns its record."""
        from speccompile.backends.tensorrt import settings
        from speccompile.backends.tensorrt.builder import BuildRequest, build_plan
        from speccompile.backends.tensorrt.import_helper import load_tensorrt
        from speccompile.backends.tensorrt.profiles import make_profiles
        from speccompile.backends.tensorrt.records import make_record, write_record

        config, spec, source = config_from_options(options), job.spec, job.dest / LOWERED_FILE
        variant = load_tensorrt(config.variant)
        profiles = make_profiles(spec, options)
        wanted = settings.settings_from_options(variant.can, spec, options, profiles, plugins, job.quantization)
        cache, limit = settings.timing_cache_file(variant, options), settings.memory_limit(options)
        request = BuildRequest(source, spec, variant.name, wanted, cache, limit)
        built = build_plan(request, job.dest / PLAN_FILE, job.progress)
        record = make_record(source, wanted, profiles, built)
        sides = spec.json_from_spec()
        write_record(job.dest / PLAN_FILE, {**record, "inputs": sides["inputs"], "outputs": sides["outputs"]})
        if not config.keep_onnx:
            for file in (source, source.with_name(f"{source.name}.data")):
                file.unlink(missing_ok=True)
        return record

    def check(self, spec: GraphSpec, options: CompileOptions, quantization: str) -> None:
        from speccompile.backends.cuda.kv_caches import refuse_states_alone
        from speccompile.backends.tensorrt import settings
        from speccompile.backends.tensorrt.import_helper import load_tensorrt
        from speccompile.backends.tensorrt.plugin_names import SPEC_VERIFY
        from speccompile.backends.tensorrt.profiles import make_profiles

        refuse_states_alone(spec)
        config = config_from_options(options)
        variant = load_tensorrt(config.variant)
        own = tensorrt_spec(spec, options.dtype, options.max_rows)
        if (odd := misaligned_states(own)) and options.max_slots > 1:
            got = f"{odd[0]} of {own.state_shapes(1)[odd[0]][1:]} a slot"
            expected = f"a multiple of {ADDRESS_BYTES} bytes: TensorRT takes no other addresses"
            raise BuildError(f"engine.backend tensorrt, {spec.name}", got, expected, "Build with max_batch_size: 1.")
        profiles = make_profiles(own, options)
        plugins = [SPEC_VERIFY] if _verifies(spec) and config.has_plugins else []
        settings.settings_from_options(variant.can, own, options, profiles, plugins, quantization)

    def predict(self, counts: WeightCounts, quantization: str, dtype: str) -> BuildSizes:
        from speccompile.backends.tensorrt.backend import predict_sizes

        return predict_sizes(counts, quantization, dtype)

    def depends_on(self, options: CompileOptions) -> dict[str, Any]:
        from speccompile.backends.tensorrt.import_helper import find_compute_capabilities, load_tensorrt
        from speccompile.backends.tensorrt.records import plugin_abi_of

        config = config_from_options(options)
        variant = load_tensorrt(config.variant)
        gpus = [list(pair) for pair in find_compute_capabilities()] if variant.can.needs_gpu_to_build else []
        return {
            "variant": variant.name,
            "version": variant.version,
            "gpus": gpus,
            "plugins": plugin_abi_of(config.has_plugins),
            "options": options,
        }

    def why_unchecked(self, file: Path | None = None) -> str | None:
        from speccompile.backends.cuda.device import open_device
        from speccompile.backends.tensorrt.import_helper import find_compute_capabilities
        from speccompile.backends.tensorrt.records import find_other_gpu, read_record

        if not find_compute_capabilities():
            return _NO_GPU
        try:
            open_device()
        except RuntimeFault as fault:  # the driver may be too old
            return f"{fault.got}: built, not run"
        other = None if file is None else find_other_gpu(read_record(file))
        return None if other is None else f"built for other GPUs: {other[1]}; not run on this one of {other[0]}"

    def tune(self, job: LoadJob) -> dict[str, Any]:
        from speccompile.backends.tensorrt.tune import measure_plan

        why = self.why_unchecked(job.path)
        return measure_plan(job) if why is None else {"measured": False, "why": why}

    def adapt_tuning(self, job: LoadJob) -> dict[str, Any]:
        from speccompile.backends.tensorrt.tune import adapt_tuning

        adapted = job.tuning if self.why_unchecked(job.path) is not None else adapt_tuning(job)
        return {**adapted, "others_bytes": job.others_bytes}

    def load(self, job: LoadJob) -> TrtEngine:
        from speccompile.backends.cuda.device import ordinal_from_name
        from speccompile.backends.tensorrt.engine import load_engine
        from speccompile.backends.tensorrt.records import check_record, plugins_to_register, read_record

        record = read_record(job.path)
        check_record(job.path, record, job.max_slots, ordinal_from_name(job.device))
        others = [] if job.rollback is None else [read_record(job.rollback)]
        settings = {**job.tuning, "variant": record["variant"], "plugins": plugins_to_register(record, *others)}
        if job.owners:  # the target, which is loaded first, is there already
            settings.pop("others_bytes", None)
        return load_engine(replace(job, tuning=settings))


def _verifies(spec: GraphSpec) -> bool:
    return bool(spec.caches) and any(t.name == specs.PATH for t in spec.outputs)


def _compacts(spec: GraphSpec) -> bool:
    return _verifies(spec) and not spec.states


def _release(model: ir.Model) -> None:
    import onnx_ir as ir

    # onnx-ir 1.1: the inputs' use lists keep replaced values alive, with their weights.
    counted = [v for held in gc.get_referents(model.graph.inputs) if isinstance(held, dict) for v in held]
    for value in [*model.graph.initializers.values(), *counted]:
        if isinstance(value, ir.Value):
            value.const_value = None
    gc.collect()


MIB = 2**20
INT4_BLOCK = 128  # inputs that share a scale, where it divides their number


def predicted_weight_bytes(
    counts: WeightCounts, quantization: str, dtype: str, *, num_head: int = 0, is_tied: bool = False
) -> int:
    """Returns the bytes of the weights in a plan, less than 1 % too few from a hidden size of 256 on.

    Args:
        quantization: none, int8, int4, fp8 or stored, of which a byte a weight is taken.
        dtype: of the graph: float32, float16 or bfloat16.
        num_head: weights of the LM head, counted in `counts.num_linear`; 0: there is none.
    """
    scalar = DTYPE_BYTES[dtype]
    linear = {"none": float(scalar), "int8": 1.0, "fp8": 1.0, "int4": 0.5 + scalar / INT4_BLOCK, "stored": 1.0}[
        quantization
    ]
    head = 0.0 if is_tied and quantization == "none" else max(linear, 1.0)
    num_body = counts.num_linear - num_head - counts.num_experts
    expert = {"none": float(scalar), "int8": 1.0, "fp8": 1.0, "int4": 0.5, "stored": float(scalar)}[quantization]
    if quantization not in ("none", STORED):
        expert += scalar / INT4_BLOCK  # their int8 has blocks too
    return int(num_body * linear + num_head * head + counts.num_experts * expert + counts.num_plain * scalar)


# Measured with TensorRT-RTX 1.7.1 by bench/tensorrt_memory.py: random Llamas of hidden 1024 to 5120, two layers, two
# profiles. A builder's process holds a constant and a multiple of the lowered weights, one of them the mapped file,
# which the kernel may drop when memory is short.
_BUILDER_FACTOR = {"none": 2.46, "int8": 1.99, "int4": 2.18, "fp8": 1.99, "stored": 2.46}
_BUILDER_BYTES, _PARENT_BYTES, _KERNEL_BYTES = 550 * MIB, 680 * MIB, 30 * MIB
# The export of a checkpoint of two bytes a weight holds six (four from random weights); lowering holds 4.5 to 6.2.
_EXPORT_BYTES_PER_PARAM = {"none": 6.0, "int8": 6.0, "int4": 6.21, "fp8": 6.0, "stored": 6.21}
_EXPORT_BYTES = {"none": 620 * MIB, "int8": 750 * MIB, "int4": 880 * MIB, "fp8": 750 * MIB, "stored": 880 * MIB}


def predict_sizes(counts: WeightCounts, quantization: str, dtype: str) -> BuildSizes:
    """Predicts a plan and the memory of its build from counts alone; the builder's peak includes the parent's."""
    num_head, is_tied = counts.num_head, counts.is_tied
    weights = predicted_weight_bytes(counts, quantization, dtype, num_head=num_head, is_tied=is_tied)
    builder = int(weights * _BUILDER_FACTOR[quantization]) + _BUILDER_BYTES + _PARENT_BYTES
    export = int(counts.num_params * _EXPORT_BYTES_PER_PARAM[quantization]) + _EXPORT_BYTES[quantization]
    return BuildSizes(weights, weights + _KERNEL_BYTES, export, builder)
