# SPDX-License-Identifier: Apache-2.0
"""Lowers a graph in several forms of weights and kernels, and keeps one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.backends.base import CompileJob, LoadJob
from speccompile.backends.machine import read_peak_rss
from speccompile.backends.onnxruntime import calibration, fidelity, kernel_library, tune
from speccompile.backends.onnxruntime.sequences import write_sequences
from speccompile.backends.writing import compiled_spec, has_int8_caches, lower_and_save
from speccompile.checkpoints.texts import TextSample
from speccompile.core.specs import NEXT_TOKEN, GraphSpec
from speccompile.graph_kinds.int8_caches import INT8, with_int8_caches
from speccompile.passes.attach_grids import Grids
from speccompile.passes.pipelines import ORT_QUANTIZATION, PACKED, onnxruntime_table
from speccompile.passes.round_linears import coarse_grids, rounded_grids
from speccompile.passes.stored_rows import StoredRows, shared_rows

if TYPE_CHECKING:
    import onnx_ir as ir

AUTO = "auto"  # the quantisation that is chosen by measuring
_CALIBRATED = "int4"
_ROW_SCALES = "rowq8"  # one scale an activation row, where the other kernels have one for 32 entries
# What `auto` chooses from: with our kernels bfloat16 stands for float32, from which it is as far as 6e-5 nats on
# SmolLM2-135M at half the bytes; int4 changes texts, so that it is asked for by name.
_AUTO = {True: ("bf16", "int8"), False: ("none", "int8")}


@dataclass(frozen=True)
class Form:
    """A quantisation of the weights with kernels for it."""

    name: str
    quantization: str  # none, bf16, int8, int4 or stored
    kernel: str  # a key of `ORT_QUANTIZATION[quantization]`

    @property
    def is_calibrated(self) -> bool:
        """Whether its weights are quantised over calibration text, where there is some."""
        return self.quantization == _CALIBRATED

    @property
    def numbers(self) -> str:
        """Names its weights and activations: forms of the same are kernels that differ by the last bits of sums."""
        return f"{self.quantization}/{_ROW_SCALES}" if self.kernel == _ROW_SCALES else self.quantization


def forms_of(quantization: str, kernel: str | None = None, *, has_experts: bool = False) -> list[Form]:
    """Returns the forms to try: those of a quantisation, or of all with `auto`; those of our kernels where they run.

    Args:
        quantization: none, bf16, int8, int4, stored or auto.
        kernel: the only one; None: all.
        has_experts: whether rows gather the weights of experts. Unquantised ones then need our kernels, where there are
            some: a prompt's rows would copy gigabytes.
    """
    if quantization == AUTO:
        return [
            Form(f"{q}/{form.kernel}", q, form.kernel)
            for q in _AUTO[kernel_library.find_library() is not None]
            for form in forms_of(q, has_experts=has_experts)
        ]
    if kernel is not None:
        return [Form(kernel, quantization, kernel)]
    # Without our kernels the packed form runs ONNX Runtime's, as the others do. With them it replaces the form of one
    # scale an activation row: it is as fast, and nearer to float32.
    has_kernels = kernel_library.find_library() is not None
    # Stored weights are those of the checkpoint in either form.
    left_out = {"rowq8", "blocks", *(("fp32",) if has_experts else ())} if has_kernels else {PACKED}
    known = ORT_QUANTIZATION.get(quantization, {quantization: ()})
    return [Form(k, quantization, k) for k in known if k not in left_out]


def compile_best(job: CompileJob, path: Path, forms: Sequence[Form], sample: TextSample | None) -> dict[str, Any]:
    """Lowers each form, measures a target's distance to float32 and the speed of the near forms, and writes one.

    Returns what `OnnxRuntimeBackend.compile` does. `sample` is a target's text; None: weights are rounded, and forms
    compared by speed alone.
    """
    model, spec, progress, int8 = job.model, job.spec, job.progress, has_int8_caches(job.options)
    says = progress or (lambda step: None)
    is_target = any(t.name == NEXT_TOKEN for t in spec.outputs)
    sample = sample if is_target else None
    tried = spec if sample is None else fidelity.with_logits(spec)
    made = with_int8_caches(tried) if int8 else tried
    by_name = {form.name: form for form in forms}
    others_bytes = 0 if is_target else _weight_bytes(model)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="forms-") as folder:
        scratch, record = Path(folder), dict[str, Any]()
        reference = scratch / "reference" / path.name
        # Levels with minimums are nearer to a target's own weights than symmetric ones, which other drafts have.
        has_target_weights = bool(spec.caches) and not spec.own_caches
        shared = shared_rows(job.quantization, job.options)
        grids: Grids | StoredRows | None = coarse_grids if has_target_weights else shared
        if sample is not None:
            # Gathered experts would be copied for every row of a text.
            packs_experts = kernel_library.find_library() is not None
            table = onnxruntime_table(tried, "none", "fp32", packs_experts=packs_experts)
            lower_and_save(model, table, reference, progress)
            if any(form.is_calibrated for form in forms):
                says("quantise")
                grids, record = _quantise(reference, tried, sample, scratch / "blocks")
        files = {name: scratch / "forms" / name / path.name for name in by_name}
        reports, step_ms, distances = {}, {}, {}
        for name, form in by_name.items():
            table = onnxruntime_table(tried, form.quantization, form.kernel, grids, int8_caches=int8)
            reports[name] = lower_and_save(model, table, files[name], progress)
            write_sequences(files[name])
        if sample is not None:
            says("distance to float32")
            distances = fidelity.measure_distances(reference, files, tried, sample, made)
            record["distance_text"] = sample.source
        near = fidelity.near_forms({name: form.numbers for name, form in by_name.items()}, distances)
        for name in near if len(forms) > 1 else ():
            says(f"measure {name}")
            measured = tune.measure_graph(LoadJob(files[name], made, others_bytes=others_bytes), tune.TYPICAL_NODES)
            step_ms[name] = measured["step_ms"]
        best = by_name[fidelity.fastest_form(step_ms) if step_ms else forms[0].name]
        if tried == spec:
            for file in files[best.name].parent.iterdir():
                file.rename(path.parent / file.name)
        else:
            table = onnxruntime_table(spec, best.quantization, best.kernel, grids, int8_caches=int8)
            lower_and_save(model, table, path, progress)
        if int8 and sample is not None:
            record |= measure_int8_caches(job, (best.quantization, best.kernel), grids, sample)
    record |= compiled_spec(spec, job.options)
    record |= {"form": best.name, "quantization": best.quantization, "forms_measured": step_ms}
    return {**record, "form_distances": {name: asdict(row) for name, row in distances.items()}, **reports[best.name]}


def measure_int8_caches(
    job: CompileJob, kind: tuple[str, str], grids: Grids | StoredRows | None, sample: TextSample
) -> dict[str, Any]:
    """Returns {"cache_distance": `Distance` from the same graph with float caches, "distance_text"}."""
    spec = fidelity.with_logits(job.spec)
    with tempfile.TemporaryDirectory(dir=job.dest, prefix="caches-") as folder:
        files = {name: Path(folder) / name / "graph.onnx" for name in ("auto", INT8)}
        for name, file in files.items():
            table = onnxruntime_table(spec, *kind, grids, int8_caches=name == INT8)
            lower_and_save(job.model, table, file, job.progress)
        rows = fidelity.measure_distances(files["auto"], {INT8: files[INT8]}, spec, sample, with_int8_caches(spec))
    return {"cache_distance": asdict(rows[INT8]), "distance_text": sample.source} if rows else {}


def _quantise(
    reference: Path, spec: GraphSpec, sample: TextSample, scratch: Path
) -> tuple[Grids | None, dict[str, Any]]:
    if sample.weights != "compensated":
        return rounded_grids if sample.weights == "rounded" else coarse_grids, {}
    found = calibration.calibrate(reference, spec, sample, scratch)
    told = {"texts": sample.source, "num_tokens": found.num_tokens, "num_linears": len(found.grids)}
    return found.grids, {"calibration": told, "peak_rss_bytes": read_peak_rss() + found.peak_rss_bytes}


def _weight_bytes(model: ir.Model) -> int:
    tensors = [value.const_value for value in model.graph.initializers.values()]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
