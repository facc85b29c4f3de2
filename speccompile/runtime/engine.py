# SPDX-License-Identifier: Apache-2.0
"""Load a bundle into an engine that decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from speccompile.core import registry
from speccompile.core.devices import backend_on
from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.protocols import Engine
from speccompile.core.sampling import SamplingParams
from speccompile.errors import BundleError
from speccompile.runtime.bundle import Bundle, check_files, read_bundle, weights_beside
from speccompile.runtime.spec_engine import Generation, SpecEngine, Stream
from speccompile.runtime.stats import TimedEngine

__all__ = ["Generation", "SpecEngine", "Stream", "load"]

TARGET, ROLLBACK = "target", "rollback"


def load(
    path: Path | str,
    *,
    backend: str | None = None,
    threads: int | None = None,
    method: str | Mapping[str, Any] | None = None,
    verify: bool = True,
) -> SpecEngine:
    """Load a bundle.

    Args:
        path: its folder.
        backend: a backend other than the one it was built for.
        threads: threads of the target's engine; None: as measured when it was built.
        method: another speculation method than the recipe's, as a name or as a speculator section; it can use
            the graphs that are in the bundle.
        verify: compare every file with its digest; done in any case where opening a graph can run code in it.

    Raises:
        BundleError: the bundle is incomplete or was changed, or the method needs a graph that is not in it.
        RecipeError: there is no such backend or method.
    """
    bundle = read_bundle(path, verify)
    recipe = bundle.recipe
    sizes = recipe["engine"]
    name, config = _method_config(recipe["speculator"], method)
    chosen = registry.method(name)
    jobs = chosen.graph_jobs(config)
    missing = [job.name for job in jobs if job.name not in bundle.graphs]
    if missing:
        todo = f"Build a bundle whose recipe has speculator.method: {name}."
        raise BundleError(str(bundle.path), f"no graph {missing[0]!r}", f"the graphs of method {name}", todo)
    backend = backend or sizes["backend"]
    if not verify and getattr(backend_on(backend, _device(bundle)), "runs_code_on_load", False):
        check_files(bundle.path, bundle.manifest["files"])
    graphs = [TARGET, *(job.name for job in jobs)]
    tunings = {graph: _tuning(bundle, graph, graphs, backend) for graph in graphs}
    context = _context(bundle, tunings)
    if threads is not None:
        tunings[TARGET]["threads"] = threads
    loaded: dict[str, Engine] = {}
    for graph in graphs:  # the target first: drafts may borrow its caches
        loaded[graph] = _load_engine(bundle, graph, backend, context, tunings[graph], dict(loaded))
    engines = {graph: TimedEngine(engine) for graph, engine in loaded.items()}
    drafts = {graph: engine for graph, engine in engines.items() if graph != TARGET}
    tokenizer_path = bundle.tokenizer_path
    return SpecEngine(
        engines[TARGET],
        drafts,
        chosen.make_proposer(config, drafts, context),
        None if tokenizer_path is None else Tokenizer.from_file(str(tokenizer_path)),
        context,
        bundle.manifest["eos_token_ids"],
        _defaults(recipe.get("decoding", {})),
        bundle,
    )


def _method_config(section: Mapping[str, Any], override: str | Mapping[str, Any] | None) -> tuple[str, Any]:
    """The method's name and its `Config`; an override of the same method keeps the recipe's other fields."""
    wanted = {"method": override} if isinstance(override, str) else dict(override or {})
    name = str(wanted.get("method", section["method"]))
    merged = {**section, **wanted} if name == section["method"] else wanted
    config_class = registry.method(name).Config
    known = {f.name for f in fields(config_class)}
    unknown = sorted(set(merged) - known - {"method"})
    if unknown:
        raise BundleError(
            f"speculator.{unknown[0]}", "an unknown field", f"one of {', '.join(sorted(known))}", "Remove it."
        )
    try:
        return name, config_class(**{key: value for key, value in merged.items() if key != "method"})
    except TypeError as fault:
        raise BundleError(
            f"method {name}", str(fault), "all its fields", "Pass them: method={'method': ...}."
        ) from fault


def _tuning(bundle: Bundle, graph: str, graphs: Sequence[str], backend: str) -> dict[str, Any]:
    """The record in the bundle, or one measured on this machine when the bundle was built on another."""
    record, loader = bundle.graphs[graph].get("tuning", {}), backend_on(backend, _device(bundle))
    threads = bundle.recipe["engine"].get("threads") if graph == TARGET else None
    fixed = threads if isinstance(threads, int) else None
    path, others = bundle.graph_path(graph), weights_beside(bundle.graph_path(graph), map(bundle.graph_path, graphs))
    tuning: dict[str, Any] = loader.adapt_tuning(path, bundle.graph_spec(graph), record, fixed, others)
    return tuning


def _context(bundle: Bundle, tunings: Mapping[str, Mapping[str, Any]]) -> MethodContext:
    sizes, graphs = bundle.recipe["engine"], bundle.graphs
    max_seq_len = int(sizes["max_seq_len"])
    limits = {g: min(max_seq_len, int(graphs[g].get("dims", {}).get("max_positions") or max_seq_len)) for g in tunings}
    return MethodContext(
        max_slots=int(sizes["max_batch_size"]),
        max_seq_len=limits[TARGET],
        max_draft_nodes=int(sizes["max_draft_nodes"]),
        costs={graph: StepCosts.from_json(tuning) for graph, tuning in tunings.items()},
        seq_lens=limits,
    )


def _load_engine(
    bundle: Bundle,
    graph: str,
    backend: str,
    context: MethodContext,
    tuning: Mapping[str, Any],
    lenders: Mapping[str, Engine],
) -> Engine:
    # Nodes that pad a ragged batch need rows behind the last that a sequence may use.
    max_rows = context.seq_lens[graph] + context.max_draft_nodes + 1
    rollback = bundle.graph_path(ROLLBACK) if graph == TARGET and ROLLBACK in bundle.graphs else None
    engine: Engine = backend_on(backend, _device(bundle)).load(
        bundle.graph_path(graph),
        bundle.graph_spec(graph),
        max_slots=context.max_slots,
        max_rows=max_rows,
        tuning=tuning,
        rollback=rollback,
        device=_device(bundle),
        lenders=lenders,
    )
    return engine


def _device(bundle: Bundle) -> str:
    return str(bundle.recipe["engine"].get("device", "cpu"))


def _defaults(decoding: Mapping[str, Any]) -> SamplingParams:
    known = {f.name for f in fields(SamplingParams)}
    given = {key: value for key, value in decoding.items() if key in known and value is not None}
    return SamplingParams(**{**given, "stop": tuple(given.get("stop", ()))})
