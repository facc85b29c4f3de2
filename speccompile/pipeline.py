# SPDX-License-Identifier: Apache-2.0
"""From a plan to a bundle: checkpoints -> export -> passes and backend -> tune -> checks -> bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccompile.backends.base import Backend
from speccompile.bundle.bundle import Bundle, read_bundle
from speccompile.bundle.choices import complete_plan
from speccompile.bundle.folder_records import BUNDLE
from speccompile.bundle.format import weights_beside
from speccompile.bundle.graphs import (
    Graph,
    compile_graph,
    compile_options,
    find_graph,
    needed_jobs,
    tune_graph,
)
from speccompile.bundle.guard import claim_folder
from speccompile.bundle.manifest import write_bundle_files
from speccompile.bundle.shared_weights import share_weights
from speccompile.bundle.stage_cache import StageCache
from speccompile.bundle.stages import Progress, StageLog
from speccompile.bundle.staging import staged_folder
from speccompile.bundle.tokenizers import check_same_tokenizer, check_tokenizer
from speccompile.common.cache_root import make_cache_folder
from speccompile.core import registry
from speccompile.core.specs import spec_from_json
from speccompile.errors import RecipeError
from speccompile.recipe.plan import VISION, BuildPlan

ROLLBACK = "rollback"


def build(
    plan: BuildPlan, dest: Path | str, progress: Progress = lambda stage: None, cache: StageCache | None = None
) -> Bundle:
    """Build the bundle of `plan`; `dest` is replaced atomically.

    An earlier bundle in `dest` is replaced if no file of it was added or changed.

    Args:
        dest: the bundle's folder; a link is followed.
        progress: called with "STAGE" and "STAGE: STEP".
        cache: source of stages whose inputs did not change; the user's cache by default.

    Raises:
        RecipeError, CheckpointError, ExportError, PassError, BuildError: see the stages.
    """
    log = StageLog(progress)
    cache = StageCache(make_cache_folder()) if cache is None else cache
    backend: Backend = registry.backend(plan.engine.backend, plan.engine.device)
    _check_device(plan, backend)
    claim = claim_folder(Path(dest), BUNDLE)
    with staged_folder(claim.path, claim.hold) as folder:
        with log.stage("prepare kernels"):
            backend.prepare()
        with log.stage("check checkpoints"):
            plan = complete_plan(plan)
            graphs = _check_checkpoints(plan, backend, log)
        graphs_folder = folder / "graphs"
        graphs_folder.mkdir()
        records: dict[str, Any] = {}
        for index, graph in enumerate(graphs):
            name = graph.job.name
            graphs[index], records[name] = compile_graph(graph, plan, backend, graphs_folder / name, cache, log)
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
        for graph in graphs:
            record = records[graph.job.name]
            spec, file = spec_from_json(record["spec"]), folder / record["file"]
            in_turn = [other for other in graphs if other.job.name != VISION]  # an image is read once, before all steps
            others = weights_beside(file, [files[other.job.name] for other in in_turn])
            record["tuning"] = tune_graph(graph, spec, plan, backend, file, others, cache, log)
        with log.stage("check graphs") as stage:
            for graph in graphs:
                record = records[graph.job.name]
                record["checks"] = _check_compiled(graph, plan, backend, folder, record)
                stage.skipped = stage.skipped or record["checks"].get("skipped")
        log.current = "bundle"
        progress(log.current)
        write_bundle_files(folder, plan, graphs[0].source.folder, records, log.rows)
    return read_bundle(claim.path, verify=False)


def _check_device(plan: BuildPlan, backend: Backend) -> None:
    if plan.engine.device not in backend.devices:
        expected = f"one of {', '.join(backend.devices)} with engine.backend: {backend.name}"
        raise RecipeError("engine.device", plan.engine.device, expected, "Choose another device or backend.")


def _check_checkpoints(plan: BuildPlan, backend: Backend, log: StageLog) -> list[Graph]:
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


def _check_compiled(
    graph: Graph, plan: BuildPlan, backend: Backend, folder: Path, record: dict[str, Any]
) -> dict[str, Any]:
    path, spec = folder / record["file"], spec_from_json(record["spec"])
    if (skipped := backend.why_unchecked(path)) is not None:
        return {"skipped": skipped}
    engine = backend.load(
        path, spec, max_slots=1, max_rows=record["max_rows"], tuning=record["tuning"], device=plan.engine.device
    )
    return graph.source.check_compiled(engine, plan.engine.max_draft_nodes + 1)
