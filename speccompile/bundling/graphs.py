# SPDX-License-Identifier: Apache-2.0
"""One decoder of a bundle: its checkpoint, its cache key, its compiled graph."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from speccompile.bundling.digests import digest_from_sources, digests_from_checkpoint, versions_from_environment
from speccompile.bundling.hub import find_config
from speccompile.bundling.stage_cache import StageCache
from speccompile.bundling.stages import StageLog
from speccompile.core.jobs import GraphJob
from speccompile.core.specs import GraphSpec, ModelDims, decoder_spec, sampled_spec, verified_spec
from speccompile.errors import BuildError, RecipeError
from speccompile.recipe.plan import TARGET, BuildPlan
from speccompile.runtime.bundle import digest_from_json, read_json, write_json

_REPORT = "compile.json"
_TUNING = "tuning.json"
# What can change a compiled graph; the runtime, the recipe reader and the methods cannot.
_SOURCES = ("core", "ops", "frontend", "passes", "backends", "bundling/graphs")


@dataclass(frozen=True)
class Decoder:
    """A decoder that is to be compiled.

    Args:
        job: name, model and quantisation.
        source: the checkpoint's folder.
        dims: its sizes.
        max_rows: rows of its cache.
        outputs: hidden states wanted: keywords of `decoder_spec`.
        key: digest of everything the compiled graph depends on.
    """

    job: GraphJob
    source: Path
    dims: ModelDims
    max_rows: int
    outputs: dict[str, Any]
    key: str = ""

    @property
    def is_target(self) -> bool:
        """Whether it verifies; the others sample."""
        return self.job.name == TARGET

    @property
    def spec(self) -> GraphSpec:
        """Inputs and outputs of the compiled graph."""
        plain = replace(decoder_spec(self.job.name, self.dims, **self.outputs), max_rows=self.max_rows)
        return verified_spec(plain) if self.is_target else sampled_spec(plain)


def find_decoder(plan: BuildPlan, job: GraphJob) -> Decoder:
    """Find and check the checkpoint of `job`.

    Raises:
        CheckpointError: missing, incomplete or damaged.
        RecipeError: the target has fewer positions than the cache would have rows.
    """
    from speccompile.backends.onnxruntime.tune import cpu_name
    from speccompile.frontend.checkpoint import check_checkpoint, read_dims, resolve_checkpoint

    source = resolve_checkpoint(job.model) if plan.weights == "checkpoint" else find_config(job.model)
    dims = read_dims(source)
    if plan.weights == "checkpoint":
        check_checkpoint(source, dims)
    max_rows = min(plan.engine.max_seq_len, dims.max_positions)
    if job.name == TARGET and max_rows < plan.engine.max_seq_len:
        got, expected = f"{plan.engine.max_seq_len}", f"at most {max_rows}, the positions of {job.model}"
        raise RecipeError("engine.max_seq_len", got, expected, "Lower it.")
    outputs = dict(plan.target_outputs) if job.name == TARGET else {}
    depends_on = {
        "checkpoint": digests_from_checkpoint(source, plan.weights),
        "weights": plan.weights,
        "quantization": job.quantization,
        "role": job.name == TARGET,
        "outputs": {k: list(v) if isinstance(v, tuple) else v for k, v in outputs.items()},
        "max_rows": max_rows,
        "backend": plan.engine.backend,
        "device": plan.engine.device,
        "machine": cpu_name(),  # kernel forms are chosen by measuring
        "versions": versions_from_environment(),
        "sources": digest_from_sources(_SOURCES),
    }
    return Decoder(job, source, dims, max_rows, outputs, digest_from_json(depends_on))


def compile_decoder(
    decoder: Decoder, plan: BuildPlan, backend: Any, folder: Path, cache: StageCache, log: StageLog
) -> tuple[Decoder, dict[str, Any]]:
    """Export and compile into `folder`, or take both from the cache.

    Returns:
        The decoder with its number of parameters, and the graph's part of the manifest.

    Raises:
        CheckpointError, ExportError, PassError, BuildError.
    """
    name = decoder.job.name

    def make(dest: Path) -> None:
        export_decoder = _import_exporter()

        with log.stage(f"export {name}"):
            model, dims = export_decoder(
                decoder.source,
                weights=plan.weights,
                max_seq_len=decoder.max_rows,
                progress=log.step,
                **decoder.outputs,
            )
        with log.stage(f"compile {name}"):
            report = backend.compile(
                model, decoder.spec, dest, quantization=decoder.job.quantization, progress=log.step
            )
        write_json(dest / _REPORT, {**report, "dims": asdict(dims)})

    if cache.fetch("graphs", decoder.key, folder, make):
        log.skip(f"export {name}", f"compile {name}")
    report = read_json(folder / _REPORT)
    (folder / _REPORT).unlink()
    decoder = replace(decoder, dims=ModelDims(**report["dims"]))
    record = {"role": TARGET if decoder.is_target else "draft", "spec": decoder.spec.json_from_spec(), **report}
    return decoder, {**record, "max_rows": decoder.max_rows, "model": decoder.job.model}


def tune_decoder(
    decoder: Decoder, plan: BuildPlan, backend: Any, graph: Path, cache: StageCache, log: StageLog
) -> dict[str, Any]:
    """Measure threads and step times of a compiled graph, or take them from the cache.

    Raises:
        BuildError: the graph does not run.
    """
    threads = None if plan.engine.threads == "auto" else plan.engine.threads

    def make(dest: Path) -> None:
        write_json(dest / _TUNING, backend.tune(graph, decoder.spec, threads))

    scratch = graph.parent / "tuning"
    with log.stage(f"tune {decoder.job.name}") as stage:
        key = digest_from_json({"graph": decoder.key, "threads": threads})
        stage.cached = cache.fetch("tunings", key, scratch, make)
        tuning = read_json(scratch / _TUNING)
        shutil.rmtree(scratch)
    return tuning


def _import_exporter() -> Any:
    """`speccompile.frontend.export.export_decoder`.

    Raises:
        BuildError: the packages that building needs are not installed.
    """
    try:
        from speccompile.frontend.export import export_decoder
    except ModuleNotFoundError as fault:
        if (fault.name or "").startswith("speccompile"):
            raise
        todo = "Run: pip install 'speccompile[build]'"
        raise BuildError("build", f"no package {fault.name}", "the packages of the extra [build]", todo) from fault
    return export_decoder
