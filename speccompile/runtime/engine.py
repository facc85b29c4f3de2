# SPDX-License-Identifier: Apache-2.0
"""Loads a bundle into an engine that decodes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from speccompile.backends.base import Backend, LoadJob
from speccompile.backends.machine import give_back_memory, num_usable_cores
from speccompile.bundle.bundle import TARGET, VISION, Bundle, check_fields, read_bundle
from speccompile.bundle.format import check_files, weights_beside
from speccompile.bundle.publish import fetch_bundle, is_hub_id
from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.core import registry
from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.protocols import Engine
from speccompile.core.sampling_params import SamplingParams
from speccompile.drafting.sliding_rows import rows_of_slot
from speccompile.drafting.tree_config import check_trees
from speccompile.errors import BundleError, RuntimeFault
from speccompile.runtime.images import ImageEncoder
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.runtime.synthetic import check_allowed

ROLLBACK = "rollback"


def load(
    path: Path | str,
    *,
    backend: str | None = None,
    threads: int | None = None,
    method: str | Mapping[str, Any] | None = None,
    verify: bool = True,
    allow_synthetic_acceptance: bool = False,
) -> SpecEngine:
    """Loads a bundle.

    Args:
        path: its folder; or its name on the Hugging Face hub, OWNER/NAME, where there is no such path.
        threads: threads of the target's engine; None: as measured when it was built. At most as many as this process
            has cores are used; where that is fewer, a warning says so.
        method: another speculation method than the recipe's, as a name or as a speculator section; it needs graphs
            that are in the bundle. One of several drafters has the fields of its own section.
        verify: compare every file with its digest; always done where loading a graph can run code in it.

    Raises:
        BundleError: the bundle is incomplete or was changed, it was built for another backend, or the method needs a
            graph that is not in it. Or its acceptance is synthetic, which is not allowed.
        RecipeError: there is no such backend or method, or it drafts trees for a target with recurrent layers that
            scores chains alone.
        RuntimeFault: `threads` is below 1.
    """
    if is_hub_id(str(path)):
        path = fetch_bundle(str(path))
    bundle = read_bundle(path, verify)
    recipe = bundle.recipe
    rates = recipe.engine.synthetic_acceptance
    check_allowed(str(bundle.path), rates, allow_synthetic_acceptance)
    name, config = method_config(recipe.speculator, method)
    chosen = registry.method(name)
    jobs = chosen.graph_jobs(config)
    jobs = tuple(job for job in jobs if not job.is_optional or job.name in bundle.graphs)
    missing = [job.name for job in jobs if job.name not in bundle.graphs]
    if missing:
        todo = f"Build a bundle whose recipe has speculator.method: {name}."
        raise BundleError(str(bundle.path), f"no graph {missing[0]!r}", f"the graphs of method {name}", todo)
    opener: Backend = registry.backend(backend or recipe.engine.backend, recipe.engine.device)
    check_trees(bundle.graph_spec(TARGET), config.draft_bounds, opener.state_trees)
    _check_backend(bundle, opener)
    if not verify and opener.runs_code_on_load:
        check_files(bundle.path, bundle.manifest["files"])
    graphs = [TARGET, *(job.name for job in jobs)]
    load_jobs = {graph: _load_job(bundle, graph, graphs, opener) for graph in graphs}
    context = _context(bundle, {graph: job.tuning for graph, job in load_jobs.items()})
    if threads is not None:
        tuning = {**load_jobs[TARGET].tuning, "threads": _usable(threads)}
        load_jobs[TARGET] = replace(load_jobs[TARGET], tuning=tuning)
    loaded: dict[str, Engine] = {}
    for graph, job in load_jobs.items():  # the target first: drafts may share its caches
        loaded[graph] = _load_engine(bundle, graph, opener, context, replace(job, owners=dict(loaded)))
    drafts = {graph: engine for graph, engine in loaded.items() if graph != TARGET}
    tokenizer_path, todo = bundle.tokenizer_path, "Build the bundle again."
    tokenizer = None if tokenizer_path is None else load_tokenizer(tokenizer_path, BundleError, todo)
    give_back_memory()  # of reading the tokenizer's file and the graphs: 27 MB beside 49,000 tokens
    return SpecEngine(
        loaded[TARGET],
        drafts,
        chosen.make_proposer(config, drafts, context),
        tokenizer,
        context,
        bundle.eos_token_ids,
        _defaults(recipe.decoding),
        bundle,
        may_stop=config.draft_bounds.is_open,
        images=_image_encoder(bundle, opener, tokenizer),
        rates=rates,
    )


def _image_encoder(bundle: Bundle, backend: Backend, tokenizer: Tokenizer | None) -> ImageEncoder | None:
    record = bundle.images
    if record is None:
        return None
    return ImageEncoder(backend.load(_load_job(bundle, VISION, [VISION], backend)), record, tokenizer)


def method_config(section: Mapping[str, Any], override: str | Mapping[str, Any] | None = None) -> tuple[str, Any]:
    """Returns a method's name and its `Config`. Raises BundleError: the section is not one of that method.

    Args:
        override: another method; the other fields of a section of the same method, or of one of several drafters, stay.
    """
    wanted = {"method": override} if isinstance(override, str) else dict(override or {})
    name = str(wanted.get("method", section["method"]))
    own: Mapping[str, Any] = next(
        (known for known in (section, *section.get("drafters", ())) if known["method"] == name), {}
    )
    merged = {**own, **wanted}
    config_class = registry.method(name).Config
    known = {f.name for f in fields(config_class)}
    unknown = sorted(set(merged) - known - {"method"})
    if unknown:
        raise BundleError(
            f"speculator.{unknown[0]}", "an unknown field", f"one of {', '.join(sorted(known))}", "Remove it."
        )
    required = [f.name for f in fields(config_class) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [field for field in required if field not in merged]:
        todo = f"Build a bundle whose recipe has speculator.method: {name}."
        expected = f"its {' and '.join(missing)}: it has graphs of its own, which are not in this bundle"
        raise BundleError(f"method {name}", "its name alone", expected, todo)
    check_fields("speculator", config_class, wanted, "Correct the value.")
    check_fields("speculator", config_class, merged)
    try:
        return name, config_class(**{key: value for key, value in merged.items() if key != "method"})
    except (TypeError, ValueError) as fault:
        raise BundleError(f"method {name}", str(fault), f"a valid {name} section", "Correct the value.") from fault


def _check_backend(bundle: Bundle, backend: Backend) -> None:
    built_for = bundle.recipe.engine.backend
    wanted, found = backend.graph_file, bundle.graph_path(TARGET)
    if found.suffix != Path(wanted).suffix:
        todo = f"Leave the backend out, or build a bundle with engine.backend: {backend.name}."
        raise BundleError(
            str(bundle.path), f"{found.name} of backend {built_for}", f"{wanted} for {backend.name}", todo
        )


def _usable(threads: int) -> int:
    """Returns `threads`, at most as many as there are cores: more would wait for each other."""
    if threads < 1:
        raise RuntimeFault("threads", str(threads), "1 or more", "Leave it out, or raise it.")
    cores = num_usable_cores()
    if threads > cores:
        warnings.warn(f"{threads} threads asked for, {cores} used: as many as there are cores", stacklevel=3)
    return min(threads, cores)


def _load_job(bundle: Bundle, graph: str, graphs: Sequence[str], backend: Backend) -> LoadJob:
    path, sizes = bundle.graph_path(graph), bundle.recipe.engine
    job = LoadJob(
        path,
        bundle.graph_spec(graph),
        tuning=bundle.graph(graph).tuning,
        device=sizes.device,
        threads=sizes.threads if graph == TARGET and sizes.threads != "auto" else None,
        others_bytes=weights_beside(path, map(bundle.graph_path, graphs)),
    )
    return replace(job, tuning=backend.adapt_tuning(job))


def _context(bundle: Bundle, tunings: Mapping[str, Mapping[str, Any]]) -> MethodContext:
    sizes = bundle.recipe.engine
    limits = {g: min(sizes.max_seq_len, bundle.graph(g).dims.max_positions or sizes.max_seq_len) for g in tunings}
    return MethodContext(
        max_slots=sizes.max_batch_size,
        max_seq_len=limits[TARGET],
        max_draft_nodes=sizes.max_draft_nodes,
        costs={graph: StepCosts.from_json(tuning) for graph, tuning in tunings.items()},
        seq_lens=limits,
    )


def _load_engine(bundle: Bundle, graph: str, backend: Backend, context: MethodContext, job: LoadJob) -> Engine:
    # Nodes that pad a ragged batch need rows after the last one that a sequence may use.
    nodes, slides = context.max_draft_nodes + 1, backend.slides_caches
    max_rows = rows_of_slot(job.spec, context.seq_lens[graph], nodes, slides=slides)
    rollback = bundle.graph_path(ROLLBACK) if graph == TARGET and ROLLBACK in bundle.graphs else None
    try:
        return backend.load(replace(job, max_slots=context.max_slots, max_rows=max_rows, rollback=rollback))
    except MemoryError as fault:
        got = f"caches of {context.max_slots} slots of {max_rows} rows, for which there is no memory"
        todo = "Build it with a smaller engine.max_batch_size or engine.max_seq_len."
        raise BundleError(f"{bundle.path} ({graph})", got, "caches that fit into memory", todo) from fault


def _defaults(decoding: Mapping[str, Any]) -> SamplingParams:
    known = {f.name for f in fields(SamplingParams)}
    given = {key: value for key, value in decoding.items() if key in known and value is not None}
    check_fields("recipe.decoding", SamplingParams, given)
    try:
        return SamplingParams(**given)
    except (RuntimeFault, TypeError, ValueError) as fault:
        raise BundleError("recipe.decoding", str(fault), "defaults of a request", "Build the bundle again.") from fault
