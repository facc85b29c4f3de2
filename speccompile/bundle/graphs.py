# SPDX-License-Identifier: Apache-2.0
"""One graph of a bundle: its source, its cache key, its compiled form."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from speccompile.backends.base import Backend, CompileJob, LoadJob
from speccompile.backends.distance import Distance
from speccompile.backends.machine import WAIT_SHARE, is_disturbed
from speccompile.bundle.choices import sample_of, why_left_out
from speccompile.bundle.format import (
    digest_from_json,
    digest_from_package,
    digest_from_sources,
    read_json,
    versions_from_environment,
    write_json,
)
from speccompile.bundle.stage_cache import StageCache, StageLog
from speccompile.checkpoints.config_values import has_alibi
from speccompile.checkpoints.folders import find_folder
from speccompile.checkpoints.lora import open_lora
from speccompile.checkpoints.target_tables import grids_of_tables
from speccompile.checkpoints.tensor_files import has_grids, open_files
from speccompile.checkpoints.texts import TextSample
from speccompile.common.extras import install_command
from speccompile.core import registry
from speccompile.core.dims import ModelDims, dims_from_json, json_from_dims
from speccompile.core.jobs import STORED, CompileOptions, GraphJob, SourceContext
from speccompile.core.protocols import GraphSource
from speccompile.core.specs import GraphSpec
from speccompile.drafting.sliding_rows import rows_of_slot
from speccompile.drafting.tree_config import check_trees
from speccompile.errors import BuildError, RecipeError
from speccompile.graph_kinds.int8_caches import INT8, int8_cache_names
from speccompile.ops.grid import GridSource
from speccompile.recipe.plan import TARGET, BuildPlan

_REPORT = "compile.json"
_TUNING = "tuning.json"
# Sources that can change a compiled graph, besides those that its backend names and its method's folder: no decode-time
# policy, no engine, no recipe reader. tests/meta/test_cache_key.py compares it with what these modules import.
SOURCES = (
    *("core/dims", "core/specs", "core/tree_shape", "core/jobs", "core/sampling", "core/multi_path", "graph_kinds"),
    *("ops", "checkpoints", "doctor", "export", "passes", "bundle/graphs"),
)
# Modules of a method's folder; options are in the key themselves.
NOT_OF_GRAPHS = ("config", "probe", "proposer", "trainer")


@dataclass(frozen=True)
class BuildContext:
    """What every stage of one build reads."""

    plan: BuildPlan
    backend: Backend
    cache: StageCache
    log: StageLog
    exported: dict[str, Any]  # neutral graphs and sizes by the names of jobs, of those that were exported ahead


@dataclass(frozen=True)
class Graph:
    """A graph to compile."""

    job: GraphJob
    source: GraphSource
    dims: Any  # its sizes; after the export with the number of parameters
    key: str = ""  # digest of everything the compiled graph depends on
    sample: TextSample | None = None

    @property
    def is_target(self) -> bool:
        return self.job.name == TARGET

    @property
    def max_rows(self) -> int:
        """Returns the rows of its caches; 0 without caches."""
        return self.source.max_rows

    @property
    def shares_weights(self) -> bool:
        return self.source.shares_weights

    @property
    def spec(self) -> GraphSpec:
        return self.source.spec()


def open_source(plan: BuildPlan, job: GraphJob, target: ModelDims | None, weights: str | None = None) -> GraphSource:
    """Returns the source of `job`, with its sizes; `target` is None for the target itself.

    Args:
        weights: "random" to read no weights; None: as in the plan.
    """
    engine = plan.engine
    shared = None if target is None else plan.target
    context = SourceContext(weights or plan.weights, engine.max_seq_len, engine.max_draft_nodes, target, shared)
    source: GraphSource = registry.find_class(job.source)(job, context)
    if target is None and engine.kv_cache == INT8 and has_alibi({"model_type": source.dims.model_type}):
        got, todo = f"int8 for {source.dims.model_type}, whose keys hold positions", "Leave engine.kv_cache out."
        raise RecipeError("engine.kv_cache", got, "rows that hold numbers to 255 exactly: auto", todo)
    return source


def needed_jobs(plan: BuildPlan, target: ModelDims) -> list[GraphJob]:
    """Returns the jobs of a plan besides the target's whose graphs its checkpoints need."""
    return [job for job in plan.jobs[1:] if not job.is_optional or open_source(plan, job, target).is_needed]


ROWS_STEP = 8  # in half precision the slots of every cache then begin at multiples of 256 bytes, as TensorRT requires


def compile_options(plan: BuildPlan, max_rows: int, rows_ahead: int = 0) -> CompileOptions:
    """Returns the options with which a graph of the plan is compiled, for sequences of `max_rows`; 0: no caches."""
    nodes = plan.engine.max_draft_nodes + 1
    # Nodes that pad a ragged batch need rows after the last that a sequence may use.
    rows = -(-(max_rows + nodes + rows_ahead) // ROWS_STEP) * ROWS_STEP if max_rows else 0
    return CompileOptions(
        dtype=plan.dtype,
        max_slots=plan.engine.max_batch_size,
        max_rows=rows,
        max_nodes=nodes,
        kv_cache=plan.engine.kv_cache,
        backend=plan.options,
        consumes_model=True,
    )


def find_graph(plan: BuildPlan, job: GraphJob, target: ModelDims | None, backend: Backend) -> Graph:
    """Find and check the checkpoint of `job`. Raises RecipeError: its sizes do not fit the target's or the recipe's."""
    source = open_source(plan, job, target)
    if plan.weights == "checkpoint":
        source.check()
    options = compile_options(plan, source.max_rows, source.spec().rows_written_ahead)
    _check_states(plan, job, source.spec(), backend, is_draft=target is not None)
    backend.check(source.spec(), options, job.quantization)
    depends_on = {
        "checkpoint": source.digests(),
        "weights": plan.weights,
        "quantization": job.quantization,
        "keeps_tables": source.needs_tables and plan.target.quantization == STORED,
        "role": source.role,
        "options": job.options,
        "spec": source.spec().json_from_spec(),
        "backend": plan.engine.backend,
        "device": plan.engine.device,
        "environment": backend.depends_on(options),
        "versions": versions_from_environment(),
        "sources": digest_from_sources((*SOURCES, *backend.graph_sources)),
        "method": digest_from_package(job.source.partition(":")[0], leave_out=NOT_OF_GRAPHS),
    }
    if options.kv_cache != "auto" and int8_cache_names(source.spec()):
        depends_on["kv_cache"] = options.kv_cache
    sample = sample_of(plan, job, source, backend)
    if sample is not None:
        depends_on["sample"] = digest_from_json(asdict(sample))
    return Graph(job, source, source.dims, digest_from_json(depends_on), sample)


def _check_states(plan: BuildPlan, job: GraphJob, spec: GraphSpec, backend: Backend, *, is_draft: bool) -> None:
    if is_draft and spec.states and not spec.state_owner:
        got = f"{job.model} with recurrent layers ({spec.states[0]}) as the graph {job.name!r}"
        todo = "Choose a draft of attention layers alone, or another method."
        raise RecipeError("speculator.model", got, "a draft of attention layers: recurrent ones not yet", todo)
    check_trees(spec, plan.speculator.draft_bounds, backend.state_trees)


def compile_graph(context: BuildContext, graph: Graph, folder: Path) -> tuple[Graph, dict[str, Any]]:
    """Exports and compiles into `folder`, or takes both from the cache; returns graph and manifest part."""
    name, plan, log = graph.job.name, context.plan, context.log

    def make(dest: Path) -> None:
        model, dims = context.exported.pop(name, None) or export_graph(name, graph.source, log)
        with log.stage(f"compile {name}") as stage:
            options = compile_options(plan, graph.max_rows, graph.spec.rows_written_ahead)
            options = replace(options, sample=graph.sample, grids=_grids_of(graph, plan))
            job = CompileJob(model, graph.spec, dest, graph.job.quantization, options=options, progress=log.step)
            report = context.backend.compile(job)
            stage.joint_peak_bytes = report.get("peak_rss_bytes", 0)
            stage.note = _note_of(graph, plan, report)
        del model, job
        gc.collect()  # weights are in reference cycles, and the next graph needs the memory
        write_json(dest / _REPORT, {**report, "dims": json_from_dims(dims)})

    if context.cache.fetch("graphs", graph.key, folder, make):
        log.skip(f"export {name}", f"compile {name}")
    report = read_json(folder / _REPORT)
    (folder / _REPORT).unlink()
    graph = replace(graph, dims=dims_from_json(type(graph.dims), report["dims"]))
    record = {"role": graph.source.role, "spec": graph.spec.json_from_spec(), **report}
    if graph.job.lora is not None:
        record["lora"] = open_lora(graph.job.lora).record(graph.job.lora)
    if graph.job.adapters:
        record["adapters"] = [{"name": name, **open_lora(folder).record(folder)} for name, folder in graph.job.adapters]
    record |= {"max_rows": graph.max_rows, "model": graph.job.model}
    if caches := _caches_of(graph, plan, context.backend):
        record["caches"] = caches
    return graph, record


def _caches_of(graph: Graph, plan: BuildPlan, backend: Backend) -> dict[str, Any]:
    # What a slot takes where it has not all rows of a sequence, or int8 ones.
    slides, is_int8 = (
        bool(graph.spec.window and backend.slides_caches),
        graph.is_target and plan.engine.kv_cache == INT8,
    )
    if not (slides or is_int8):
        return {}
    rows = rows_of_slot(graph.spec, graph.max_rows, plan.engine.max_draft_nodes + 1, slides=slides)
    row_bytes = graph.dims.cache_row_bytes_in(INT8 if is_int8 else "float32")
    return {"rows": rows, "slot_bytes": rows * row_bytes, "dtype": INT8 if is_int8 else plan.dtype, "slides": slides}


def _grids_of(graph: Graph, plan: BuildPlan) -> GridSource | None:
    if graph.job.quantization == STORED:
        return open_files(graph.source.folder)
    if not graph.is_target and plan.target.quantization == STORED and graph.source.needs_tables:
        return grids_of_tables(find_folder(plan.target, plan.weights))
    return None


def _note_of(graph: Graph, plan: BuildPlan, report: Mapping[str, Any]) -> str | None:
    """Returns what a user should know of a graph's weights; None: nothing."""
    quantization = graph.job.quantization
    if held := report.get("weights"):
        names = ", ".join(held["float_names"]) + ", ..." * (held["num_float"] > len(held["float_names"]))
        told = f"the checkpoint has no levels of {held['num_float']} linears, which stay floats: {names}"
        wide = f"{held['num_widened']} linears have the checkpoint's numbers in {plan.dtype}, as the backend's types do"
        notes = [told] * bool(held["num_float"]) + [f"{wide} not hold their levels"] * bool(held["num_widened"])
        return "; ".join(notes) or None
    if quantization == STORED or plan.weights != "checkpoint" or not has_grids(graph.source.folder):
        return None
    if quantization == "none":
        return f"weights that are quantised already are written in {plan.dtype}; stored keeps them as they are"
    row = report.get("form_distances", {}).get(report.get("form"), {})
    told = f" (from these over the build's text: {Distance.from_json(row).summary()})" if row else ""
    return f"{quantization} rounds weights that are quantised already{told}; stored keeps them as they are"


def tune_graph(context: BuildContext, graph: Graph, job: LoadJob) -> dict[str, Any]:
    """Measure threads and step times of a compiled graph, or take them from the cache."""
    cache, unmeasured = context.cache, context.backend.why_unchecked(job.path)

    def make(dest: Path) -> None:
        write_json(dest / _TUNING, context.backend.tune(job))

    scratch = job.path.parent / "tuning"
    with context.log.stage(f"tune {graph.job.name}") as stage:
        facts = {"threads": job.threads, "others_bytes": job.others_bytes, "unmeasured": unmeasured}
        key = digest_from_json({"graph": graph.key, **facts})
        stage.cached, stage.skipped = cache.fetch("tunings", key, scratch, make), unmeasured
        tuning = read_json(scratch / _TUNING)
        shutil.rmtree(scratch)
        if is_disturbed(tuning):
            cache.forget("tunings", key)
            share = f"{tuning[WAIT_SHARE]:.0%}"
            stage.note = f"measured beside other work ({share} of the time waiting for a CPU); measured again at load"
    return tuning


def leaves_out(context: BuildContext, job: GraphJob, records: dict[str, Any], files: dict[str, Path]) -> bool:
    """Returns whether a draft is left out, see `why_left_out`; what was made of it is removed."""
    parts = {name: list(file.parent.glob(f"{file.stem}*")) for name, file in files.items()}
    sizes = {name: sum(part.stat().st_size for part in found) for name, found in parts.items()}
    if (why := why_left_out(job, records, sizes)) is None:
        return False
    context.log.leave_out(job.name, why)
    for part in parts.get(job.name, ()):
        part.unlink()
    records.pop(job.name, None)
    files.pop(job.name, None)
    return True


def export_graph(name: str, source: GraphSource, log: StageLog) -> Any:
    """Returns the source's graph and sizes."""
    with log.stage(f"export {name}"):
        return _export(source, log)


def _export(source: GraphSource, log: StageLog) -> Any:
    try:
        return source.export(log.step)
    except ModuleNotFoundError as fault:
        if (fault.name or "").startswith("speccompile"):
            raise
        todo = f"Run: {install_command('build')}"
        raise BuildError("build", f"no package {fault.name}", "the packages of the extra [build]", todo) from fault
