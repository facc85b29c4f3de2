# SPDX-License-Identifier: Apache-2.0
"""From a plan to a bundle: checkpoints -> export -> passes and backend -> tune -> checks -> bundle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speccompile.backends.base import Backend, LoadJob
from speccompile.bundle.bundle import Bundle, read_bundle
from speccompile.bundle.choices import complete_plan, with_drafts_of
from speccompile.bundle.format import BUNDLE, weights_beside
from speccompile.bundle.graphs import (
    BuildContext,
    Graph,
    compile_graph,
    compile_options,
    export_graph,
    find_graph,
    leaves_out,
    needed_jobs,
    open_source,
    tune_graph,
)
from speccompile.bundle.report import write_bundle_files
from speccompile.bundle.shared_weights import share_weights
from speccompile.bundle.stage_cache import Progress, StageCache, StageLog
from speccompile.bundle.staging import claim_folder, staged_folder
from speccompile.bundle.tokenizers import check_same_tokenizer, check_tokenizer
from speccompile.common.cache_root import make_cache_folder
from speccompile.core import registry
from speccompile.core.specs import spec_from_json
from speccompile.errors import RecipeError
from speccompile.recipe.plan import TARGET, VISION, BuildPlan

ROLLBACK = "rollback"


@dataclass(frozen=True)
class Beginning:
    """What was done of a build before its key is known."""

    log: StageLog
    exported: dict[str, Any] = field(default_factory=dict)


def begin(plan: BuildPlan, progress: Progress = lambda stage: None) -> Beginning:
    """Begins what the backend makes once for this machine, on which the keys of graphs depend."""
    made, backend = Beginning(StageLog(progress)), registry.backend(plan.engine.backend, plan.engine.device)
    _check_device(plan, backend)
    if not backend.is_ready():
        backend.prepare(wait=False)
        plan = complete_plan(plan)
        made.exported[TARGET] = export_graph(TARGET, open_source(plan, plan.target, None), made.log)
    return made


def build(
    plan: BuildPlan,
    dest: Path | str,
    progress: Progress = lambda stage: None,
    cache: StageCache | None = None,
    beginning: Beginning | None = None,
) -> Bundle:
    """Builds the bundle of `plan`; `dest` or what it links to is replaced atomically, if no file there was changed.

    Args:
        progress: called with "STAGE" and "STAGE: STEP".
        cache: source of stages whose inputs did not change; the user's cache by default.
        beginning: what `begin` did with the same plan; None: it is called here.
    """
    cache = StageCache(make_cache_folder()) if cache is None else cache
    claim = claim_folder(Path(dest), BUNDLE)
    with staged_folder(claim.path, claim.hold) as folder:
        begun = begin(plan, progress) if beginning is None else beginning
        log = begun.log
        backend: Backend = registry.backend(plan.engine.backend, plan.engine.device)
        with log.stage("prepare kernels"):
            backend.prepare()
        with log.stage("check checkpoints"):
            plan = complete_plan(plan)
            context = BuildContext(plan, backend, cache, log, begun.exported)
            found = _check_checkpoints(context)
        (graphs_folder := folder / "graphs").mkdir()
        graphs, records = list[Graph](), dict[str, Any]()
        for graph in found:
            if not leaves_out(context, graph.job, records, {}):
                made, records[graph.job.name] = compile_graph(context, graph, graphs_folder / graph.job.name)
                graphs.append(made)
        if graphs[0].dims.attention_layers:  # without caches there is nothing to compact
            with log.stage(f"compile {ROLLBACK}"):
                options = compile_options(plan, graphs[0].max_rows)
                spec = backend.compile_rollback(graphs[0].dims, graphs_folder / ROLLBACK, options)
                records[ROLLBACK] = {"role": ROLLBACK, "spec": spec.json_from_spec()}
        files = {name: graphs_folder / name / backend.graph_file for name in records}
        for graph in graphs:
            if graph.shares_weights and backend.graph_file.endswith(".onnx"):
                name = graph.job.name
                with log.stage(f"share weights of {name}"):
                    files[name], records[name]["shared_bytes"] = share_weights(files[plan.target.name], files[name])
        for name, record in records.items():
            record["file"] = files[name].relative_to(folder).as_posix()
        threads = None if plan.engine.threads == "auto" else plan.engine.threads
        in_turn = [files[graph.job.name] for graph in graphs if graph.job.name != VISION]  # an image is read once
        jobs: list[tuple[Graph, LoadJob]] = []
        for graph in graphs:
            record = records[graph.job.name]
            spec, file = spec_from_json(record["spec"]), files[graph.job.name]
            job = LoadJob(file, spec, max_rows=record["max_rows"], device=plan.engine.device, threads=threads)
            job = replace(job, others_bytes=weights_beside(file, in_turn))
            record["tuning"] = tune_graph(context, graph, job)
            if not leaves_out(context, graph.job, records, files):
                jobs.append((graph, replace(job, tuning=record["tuning"])))
        with log.stage("check graphs") as stage:
            for graph, job in jobs:
                checks = records[graph.job.name]["checks"] = _check_compiled(context, graph, job)
                stage.skipped = stage.skipped or checks.get("skipped")
        progress("bundle")
        write_bundle_files(folder, with_drafts_of(plan, records), graphs[0].source.folder, records, log.rows)
    return read_bundle(claim.path, verify=False)


def _check_device(plan: BuildPlan, backend: Backend) -> None:
    if plan.engine.device not in backend.devices:
        expected = f"one of {', '.join(backend.devices)} with engine.backend: {backend.name}"
        raise RecipeError("engine.device", plan.engine.device, expected, "Choose another device or backend.")


def _check_checkpoints(context: BuildContext) -> list[Graph]:
    plan, backend, log = context.plan, context.backend, context.log
    log.step(plan.target.name)
    target = find_graph(plan, plan.target, None, backend)
    check_tokenizer(target.source.folder, target.dims, plan.weights)
    graphs = [target]
    for job in needed_jobs(plan, target.dims):
        log.step(job.name)
        graphs.append(graph := find_graph(plan, job, target.dims, backend))
        if graph.source.has_tokenizer:
            may_differ = registry.method(plan.method).allows_tokenizer_mismatch(plan.speculator)
            sides = ((target.source.folder, target.dims), (graph.source.folder, graph.dims))
            check_same_tokenizer(job.name, *sides, may_differ=may_differ)
    return graphs


def _check_compiled(context: BuildContext, graph: Graph, job: LoadJob) -> dict[str, Any]:
    if (skipped := context.backend.why_unchecked(job.path)) is not None:
        return {"skipped": skipped}
    return graph.source.check_compiled(context.backend.load(job), context.plan.engine.max_draft_nodes + 1)
