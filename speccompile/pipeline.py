# SPDX-License-Identifier: Apache-2.0
"""From a plan to a bundle: checkpoints -> export -> passes and backend -> tune -> checks -> bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccompile.bundling.checks import MIN_ROWS, check_draft, check_target
from speccompile.bundling.graphs import Decoder, compile_decoder, find_decoder, tune_decoder
from speccompile.bundling.manifest import write_bundle_files
from speccompile.bundling.stage_cache import StageCache, default_cache_folder
from speccompile.bundling.stages import Progress, StageLog
from speccompile.bundling.staging import staged_folder
from speccompile.bundling.tokenizers import check_same_tokenizer, check_tokenizer
from speccompile.core import registry
from speccompile.errors import BuildError, RecipeError
from speccompile.recipe.plan import BuildPlan
from speccompile.runtime.bundle import MANIFEST, Bundle, read_bundle

ROLLBACK = "rollback"


def build(
    plan: BuildPlan, dest: Path, progress: Progress = lambda stage: None, cache: StageCache | None = None
) -> Bundle:
    """Build the bundle of `plan`; `dest` is replaced whole or not touched.

    Args:
        plan: see `speccompile.recipe.resolve`.
        dest: the bundle's folder.
        progress: called with "STAGE" and "STAGE: STEP".
        cache: stages whose inputs did not change are taken from it; the user's own by default.

    Raises:
        RecipeError, CheckpointError, ExportError, PassError, BuildError: see the stages.
    """
    dest = dest.absolute()
    log = StageLog(progress)
    cache = StageCache(default_cache_folder()) if cache is None else cache
    backend = registry.backend(plan.engine.backend)
    _check_place(plan, backend, dest)
    with staged_folder(dest) as folder:
        with log.stage("check checkpoints"):
            decoders = _check_checkpoints(plan, log)
        graphs = folder / "graphs"
        graphs.mkdir()
        records: dict[str, Any] = {}
        for index, decoder in enumerate(decoders):
            name = decoder.job.name
            decoders[index], records[name] = compile_decoder(decoder, plan, backend, graphs / name, cache, log)
        with log.stage(f"compile {ROLLBACK}"):
            spec = backend.compile_rollback(decoders[0].dims, graphs / ROLLBACK)
            records[ROLLBACK] = {"role": ROLLBACK, "spec": spec.json_from_spec()}
        for name, record in records.items():
            record["file"] = _graph_file(graphs / name).relative_to(folder).as_posix()
        for decoder in decoders:
            record = records[decoder.job.name]
            record["tuning"] = tune_decoder(decoder, plan, backend, folder / record["file"], cache, log)
        with log.stage("check graphs"):
            for decoder in decoders:
                record = records[decoder.job.name]
                record["checks"] = _check_graph(decoder, plan, backend, folder / record["file"], record["tuning"])
        log.current = "bundle"
        progress(log.current)
        write_bundle_files(folder, plan, decoders[0].source, records, log.rows)
    return read_bundle(dest, verify=False)


def _check_place(plan: BuildPlan, backend: Any, dest: Path) -> None:
    if plan.engine.device not in backend.devices:
        expected = f"one of {', '.join(backend.devices)} with engine.backend: {backend.name}"
        raise RecipeError("engine.device", plan.engine.device, expected, "Choose another device or backend.")
    if dest.is_file() or (dest.is_dir() and any(dest.iterdir()) and not (dest / MANIFEST).exists()):
        got = "a file" if dest.is_file() else "a folder with other things in it"
        raise BuildError(str(dest), got, "a bundle to replace, or nothing", "Choose another place with -o.")


def _check_checkpoints(plan: BuildPlan, log: StageLog) -> list[Decoder]:
    decoders = []
    for job in plan.jobs:
        log.step(job.name)
        decoders.append(find_decoder(plan, job))
    target, *drafts = decoders
    check_tokenizer(target.source, target.dims, plan.weights)
    for draft in drafts:
        may_differ = bool(getattr(plan.speculator, "allow_tokenizer_mismatch", False))
        sides = ((target.source, target.dims), (draft.source, draft.dims))
        check_same_tokenizer(draft.job.name, *sides, may_differ=may_differ)
    return decoders


def _graph_file(folder: Path) -> Path:
    """The one file of a compiled graph that is not its weights."""
    (file,) = (f for f in folder.iterdir() if f.suffix != ".data")
    return file


def _check_graph(decoder: Decoder, plan: BuildPlan, backend: Any, path: Path, tuning: dict[str, Any]) -> dict[str, Any]:
    if decoder.max_rows < MIN_ROWS:
        return {}
    engine = backend.load(
        path, decoder.spec, max_slots=1, max_rows=decoder.max_rows, tuning=tuning, device=plan.engine.device
    )
    return check_target(engine) if decoder.is_target else check_draft(engine)
