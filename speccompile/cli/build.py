# SPDX-License-Identifier: Apache-2.0
"""speccompile build: recipe in, bundle out."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from speccompile.cli.options import with_model_options
from speccompile.cli.output import errors_as_json, live_stages, print_json, print_warning, quiet_libraries
from speccompile.cli.verify import leave_unless_passed, print_certificate, run_verify

if TYPE_CHECKING:
    from speccompile.backends.base import Backend
    from speccompile.bundle.bundle import Bundle
    from speccompile.recipe import BuildPlan


_SIZES = {
    "weights": "weights_bytes",
    "of them adapters": "adapter_bytes",
    "smallest file": "least_file_bytes",
    "largest file": "file_bytes",
    "caches": "cache_bytes",
    "export peak": "export_peak_bytes",
    "builder peak": "builder_peak_bytes",
}


@with_model_options
def build_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A recipe (docs/reference/recipe.md), a checkpoint's folder, a GGUF file or an id of the hub.",
        ),
    ],
    model: Any,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The bundle's folder; bundles/NAME by default.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Short for --set engine.backend=...")] = None,
    weights: Annotated[
        str | None, typer.Option(help="'random' builds from config.json alone; short for --set target.weights=...")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its predicted sizes only.")] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Redo every stage and keep none.")] = False,
    dump_passes: Annotated[
        Path | None,
        typer.Option(help="Write each graph as text after each pass into this folder, new or empty; as --no-cache."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Verify the bundle then, as `speccompile verify`.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Build a bundle from a recipe or a model.

    Without a recipe one is written: weights in the fastest form near float32, and the best drafter that needs no second
    model. The bundle's recipe.yaml is the recipe that was used, with all defaults.

    An existing bundle is replaced in one step when the new one is complete, and only where no file in it was added
    or edited. A build that fails or is stopped leaves no files; what a killed one leaves is removed by the
    next. Stages whose inputs did not change come from $SPECCOMPILE_CACHE (~/.cache/speccompile).

    Stages: prepare kernels (for this CPU, once), check checkpoints, export (the model as a graph), compile (passes,
    then the backend; rollback is the graph that keeps one path of a tree in the cache), share weights, tune (the time
    of steps by their size, which decides how far to draft), check graphs. See docs/explanation/flow.md.
    """
    from speccompile.prepare import plan_from_source
    from speccompile.recipe.predict import build_seconds

    quiet_libraries()
    settings = [*model.settings]
    settings += [f"engine.backend={backend}"] if backend is not None else []
    settings += [f"target.weights={weights}"] if weights is not None else []
    with errors_as_json(as_json):
        with live_stages():  # a hub model is downloaded here
            plan = plan_from_source(source, replace(model, settings=tuple(settings), reads_weights=not dry_run))
        _warn_without_device(plan)
        if dry_run:
            prediction, dest = _predictions(plan), output or Path("bundles") / _name(source)
            machine, seconds = _compare(plan, prediction, dest, no_cache), build_seconds(plan, prediction)
            if as_json:
                found = {"predicted": prediction, "machine": machine, "build_seconds": seconds}
                print_json({"plan": plan.recipe_from_plan(), **found})
            else:
                _print_plan(plan, prediction)
                _print_machine(machine, seconds)
            return
        bundle = _build(plan, output or Path("bundles") / _name(source), no_cache, dump_passes)
        certificate = run_verify(bundle.path) if verify else None
    if as_json:
        print_json({**_json_from_bundle(bundle), **({"certificate": certificate} if certificate else {})})
    else:
        _print_bundle(bundle)
        if certificate:
            print_certificate(bundle.path, certificate)
    if certificate:
        leave_unless_passed(certificate)


def _name(source: str) -> str:
    path = Path(source)
    return (
        path.resolve().name if path.is_dir() else path.stem if path.is_file() or path.suffix == ".gguf" else path.name
    )


def _warn_without_device(plan: BuildPlan) -> None:
    from speccompile.core import registry

    why = registry.backend(plan.engine.backend, plan.engine.device).why_unchecked()
    if why is not None:
        print_warning(f"{_reason(why)}: nothing is tuned or checked, and the bundle cannot be decoded with here")


def _reason(why: str) -> str:
    return why.rpartition(":")[0] or why


def _build(plan: BuildPlan, dest: Path, no_cache: bool, dump: Path | None) -> Bundle:
    from speccompile.bundle.stage_cache import StageCache
    from speccompile.pipeline import build

    with live_stages() as progress, dumped_passes(dump, progress) as report:
        return build(plan, dest, report, StageCache(None) if no_cache or dump else None)


def _predictions(plan: BuildPlan) -> dict[str, Any]:
    from speccompile.bundle.graphs import open_source
    from speccompile.checkpoints.checkpoint import read_text_config
    from speccompile.checkpoints.lora import bytes_of_factors
    from speccompile.core import registry
    from speccompile.export.decoder_source import DecoderSource
    from speccompile.recipe.predict import own_cache_bytes, predict, predict_counts

    backend: Backend = registry.backend(plan.engine.backend)
    graphs, target = {}, None
    for job in plan.jobs:
        source = open_source(plan, job, target, weights="random")
        if job.is_optional and not source.is_needed:
            continue
        counts, slots = source.counts(), plan.engine.max_batch_size
        if counts is None:
            config = read_text_config(source.folder)
            if isinstance(source, DecoderSource):
                check_class(source.folder)
            sizes = (slots, source.max_rows if source.spec().own_caches else 0, backend, plan.dtype)
            num_nodes = plan.engine.max_draft_nodes + 1
            kv_cache = plan.engine.kv_cache if target is None else "auto"
            prediction = predict(
                config, source.dims, job.quantization, *sizes, max_pending=num_nodes, kv_cache=kv_cache
            )
        else:
            held_bytes = own_cache_bytes(source.spec(), slots, source.max_rows, plan.dtype)
            prediction = predict_counts(counts, job.quantization, held_bytes, backend, plan.dtype)
        target = target or source.dims
        graphs[job.name] = made = prediction.json_from_prediction()
        if job.adapters:
            made["adapter_bytes"] = bytes_of_factors(job)
            for key in ("weights_bytes", "file_bytes", "least_file_bytes"):
                made[key] += made["adapter_bytes"]
    total = {
        "bundle_bytes": sum(g["file_bytes"] for g in graphs.values()),
        "least_bundle_bytes": sum(g["least_file_bytes"] for g in graphs.values()),
        "runtime_bytes": sum(g["weights_bytes"] + g["cache_bytes"] for g in graphs.values()),
        "build_peak_bytes": max(g["build_peak_bytes"] for g in graphs.values()),
    }
    return {"graphs": graphs, "total": total}


def check_class(folder: Path) -> None:
    """Lets a model's own class read its config, if it is installed; raises as `export.weights.check_model`."""
    from importlib.util import find_spec

    if find_spec("torch") and find_spec("transformers"):
        from speccompile.export.weights import check_model

        check_model(folder)


def _print_plan(plan: BuildPlan, prediction: dict[str, Any]) -> None:
    from speccompile.bundle.report import dotted_keys, text_from_bytes, text_from_value

    console = Console(highlight=False)
    table = Table(Column("key", no_wrap=True), Column("value", overflow="fold"), box=None, header_style="dim")
    for key, value in dotted_keys(plan.recipe_from_plan()):
        table.add_row(key, Text(text_from_value(value)))
    console.print(table)
    graphs = prediction["graphs"]
    columns = (Column(Text(name), justify="right", overflow="fold") for name in graphs)
    sizes = Table(Column("graph", overflow="fold"), *columns, box=None, header_style="dim")
    sizes.add_row("parameters", *(f"{graph['num_params'] / 1e6:.1f} M" for graph in graphs.values()))
    for label, key in _SIZES.items():
        cells = [text_from_bytes(graph[key]) if graph.get(key) else "" for graph in graphs.values()]
        if any(cells):
            sizes.add_row(label, *cells)
    total = {k: text_from_bytes(v) for k, v in prediction["total"].items()}
    console.print(sizes)
    sizes_of_bundle = dict.fromkeys((total["least_bundle_bytes"], total["bundle_bytes"]))
    console.print(
        f"bundle {' to '.join(sizes_of_bundle)}, as the form that measures best, "
        f"decoding at most about {total['runtime_bytes']}, "
        f"building at most about {total['build_peak_bytes']} of memory"
    )


def _compare(plan: BuildPlan, prediction: dict[str, Any], dest: Path, no_cache: bool) -> list[dict[str, Any]]:
    from speccompile.common.cache_root import cache_root
    from speccompile.recipe.predict import compare

    disks = {"the bundle": dest} if no_cache else {"the bundle": dest, "the cache": cache_root()}
    return compare(plan, prediction, disks)


def _print_machine(machine: list[dict[str, Any]], seconds: tuple[int, int] | None) -> None:
    """Prints what the machine has, how long the build may take, and a warning where something is too small."""
    from speccompile.bundle.report import text_from_bytes
    from speccompile.cli.output import text_from_seconds
    from speccompile.recipe.predict import TIME_BASIS

    free = {row["where"]: row["free_bytes"] for row in machine}
    texts = (f"{where} {'not known' if size is None else text_from_bytes(size)}" for where, size in free.items())
    console = Console(highlight=False, markup=False)
    console.print(f"free on this machine: {', '.join(texts)}")
    if seconds is not None:
        low, high = map(text_from_seconds, seconds)
        console.print(f"the build takes about {low} to {high} ({TIME_BASIS})")
    for row in machine:
        if row["free_bytes"] is not None and row["needed_bytes"] > row["free_bytes"]:
            needed, here = text_from_bytes(row["needed_bytes"]), text_from_bytes(row["free_bytes"])
            print_warning(f"{row['what']}: about {needed} of {row['where']} needed, {here} free. {row['todo']}")


def _json_from_bundle(bundle: Bundle) -> dict[str, Any]:
    return {
        "bundle": str(bundle.path),
        "size_bytes": sum(f["size_bytes"] for f in bundle.manifest["files"].values()),
        "graphs": {
            name: {"file": g["file"], "form": g.get("form"), "checks": g.get("checks"), "tuning": g.get("tuning")}
            for name, g in bundle.graphs.items()
        },
        "stages": bundle.manifest["stages"],
        "peak_rss_bytes": max(s["peak_rss_bytes"] for s in bundle.manifest["stages"]),
        "seconds": round(sum(s["seconds"] for s in bundle.manifest["stages"]), 3),
    }


def _print_bundle(bundle: Bundle) -> None:
    from speccompile.bundle.report import text_from_bytes

    facts = _json_from_bundle(bundle)
    size, peak = text_from_bytes(facts["size_bytes"]), text_from_bytes(facts["peak_rss_bytes"])
    path = os.path.relpath(bundle.path)
    path = str(bundle.path) if path.startswith("..") else path
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{path}: {size}, built in {facts['seconds']:.1f} s, peak memory {peak}")
    console.print(f"Report: {path}/report.html. {_hint(bundle, shlex.quote(path))}")


def _hint(bundle: Bundle, path: str) -> str:
    from speccompile.common.tokenizer_file import knows_chats

    skipped = [stage["skipped"] for stage in bundle.manifest["stages"] if stage.get("skipped")]
    if skipped:
        return f"Not tuned, not checked ({_reason(skipped[0])}). Try: speccompile inspect {path}"
    if knows_chats(bundle.path / "tokenizer"):
        return f"It knows chats. Try: speccompile serve {path}, or speccompile chat {path}"
    return f'Try: speccompile generate {path} --prompt "def "'


_LOGGER = "speccompile.passes.base"  # its records have the model


class PassDump(logging.Handler):
    """Writes FOLDER/STAGE/NUMBER-PASS.txt. `folder`: new or empty."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.DEBUG)
        self._folder, self._stage, self._number = folder, "", 0

    def begin(self, message: str) -> None:
        """Takes the stage of a message "STAGE" or "STAGE: STEP"."""
        stage = message.partition(": ")[0].replace(" ", "-")
        if stage != self._stage:
            self._stage, self._number = stage, 0

    def emit(self, record: logging.LogRecord) -> None:
        from speccompile.passes.text import text_from_model

        model, name, num_rewrites = record.graph  # type: ignore[attr-defined]
        if not num_rewrites:
            return
        folder = self._folder / self._stage
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self._number:03}-{name}.txt").write_text(text_from_model(model), encoding="utf-8")
        self._number += 1


@contextlib.contextmanager
def dumped_passes(folder: Path | None, progress: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Yields the callback that writes passes of a build; None: no folder. Raises BuildError: it is not new or empty."""
    if folder is None:
        yield progress
        return
    from speccompile.bundle.staging import claim_folder

    dump, logger = PassDump(claim_folder(folder).path), logging.getLogger(_LOGGER)
    level = logger.level

    def report(message: str) -> None:
        dump.begin(message)
        progress(message)

    logger.addHandler(dump)
    logger.setLevel(logging.DEBUG)
    try:
        yield report
    finally:
        logger.removeHandler(dump)
        logger.setLevel(level)
