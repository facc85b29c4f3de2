# SPDX-License-Identifier: Apache-2.0
"""Measures a bundle: the jobs of its modes, their rounds, and the report of all figures."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from speccompile.benchmark.reference import Reference, find_reference, not_run, reference_of_round, why_no_transformers
from speccompile.benchmark.rounds import Runs, open_workers, run_rounds
from speccompile.benchmark.samples import Sample, figures_by_group, groups_from_samples
from speccompile.benchmark.summary import summary_from_runs
from speccompile.bundle.format import package_version
from speccompile.core import registry
from speccompile.errors import RecipeError, RuntimeFault
from speccompile.version import VERSION

if TYPE_CHECKING:
    from speccompile.bundle.bundle import Bundle
    from speccompile.core.jobs import GraphJob

MODES = ("plain", "speculative", "transformers", "transformers-assisted")
PACKAGES = ("numpy", "onnxruntime", "tokenizers", "torch", "transformers")
_BUSY = "figures beside other work are those of a busy machine; end it and measure again."

Job = dict[str, Any]
MoreJobs = Callable[[Job, dict[str, str]], list[Job]]


@dataclass(frozen=True)
class Settings:
    """How to measure."""

    modes: str = "all"  # of `MODES`, comma-separated; `all`: those that can run here
    method: str | None = None  # None: the recipe's
    also: Sequence[str] = ()  # more methods; each runs beside plain decoding in a process of its own
    max_new_tokens: int = 128
    repeats: int = 5
    threads: int | None = None  # None: as tuned
    assistant_tokens: int = 4  # draft length of the mode `transformers-assisted`, at least 1
    has_reference: bool = True


def read_methods(names: str | None) -> list[str]:
    """Returns the methods of `--also`.

    Raises:
        RecipeError: there is no such method; the nearest name is suggested.
        RuntimeFault: one of them is named twice, or drafts nothing.
    """
    methods = [name.strip() for name in (names or "").split(",") if name.strip()]
    for name in methods:
        registry.method(name)
    if len(set(methods)) < len(methods) or "none" in methods:
        expected = "speculation methods, each once"
        raise RuntimeFault("--also", repr(names), expected, "Plain decoding stands beside each of them in any case.")
    return methods


def choose_modes(wanted: str, bundle: Bundle, method: str | None) -> list[str]:
    """Returns the modes of `Settings.modes`.

    Raises:
        RecipeError: a mode is unknown or named twice.
        RuntimeFault: transformers cannot run here.
    """
    is_plain = (method or bundle.recipe.method) == "none"
    possible = [m for m in MODES if not (is_plain and m in ("speculative", "transformers-assisted"))]
    if wanted == "all":
        return [m for m in possible if not m.startswith("transformers") or why_no_transformers(bundle) is None]
    chosen = [m.strip() for m in wanted.split(",") if m.strip()]
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(possible):
        expected = f"some of {', '.join(possible)}, each once"
        raise RecipeError("--modes", repr(wanted), expected, "Correct the option.")
    for mode in chosen:
        if mode.startswith("transformers") and (why := why_no_transformers(bundle)) is not None:
            raise RuntimeFault(f"--modes {mode}", why, "the target in transformers", "Mend it, or leave the mode out.")
    return chosen


def measure(
    bundle: Bundle,
    samples: Sequence[Sample],
    lengths: Sequence[int],
    settings: Settings,
    more_jobs: MoreJobs = lambda job, left_out: [],
    warn: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Returns the report of a benchmark.

    Args:
        lengths: context lengths of the samples; empty: as the prompts are.
        more_jobs: returns further jobs, made of one without modes; it may name what is left out.

    Raises:
        RecipeError, RuntimeFault: see `choose_modes`; or a mode cannot load its model.
    """
    modes, left_out = choose_modes(settings.modes, bundle, settings.method), dict[str, str]()
    base = job_of_bundle(bundle, None, samples, settings)
    jobs = [*_own_jobs(bundle, modes, samples, settings, base), *more_jobs(base, left_out)]
    environment = _environment(bundle, base, len(samples), settings)
    if (load := environment["load_average_before"]) and load[0] > (environment["num_cores"] or 1):
        warn(f"the load average is {load[0]:.1f} on {environment['num_cores']} cores: {_BUSY}")
    reference = None if settings.has_reference else not_run("--no-reference")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        if reference is None and MODES[2] not in modes:
            task = bar.add_task("texts of transformers in float32", total=len(samples))
            reference = find_reference(bundle, base, lambda prompt: bar.advance(task))
            bar.remove_task(task)
        loading = bar.add_task("load", total=None)
        with open_workers(jobs, lambda job, error: left_out.update({_name(job): str(error)})) as workers:
            bar.remove_task(loading)
            num_modes = sum(len(worker.modes) for worker in workers)
            task = bar.add_task("measure", total=num_modes * len(samples) * settings.repeats)
            runs = run_rounds(workers, len(samples), settings.repeats, lambda mode: bar.advance(task))
    if reference is None:
        reference = reference_of_round(runs[MODES[2]][0]) if MODES[2] in runs else not_run(left_out[MODES[2]])
    groups = groups_from_samples(samples, lengths)
    return {**_report(runs, reference, groups, environment, bundle.eos_token_ids), "left_out": left_out}


def _name(job: Mapping[str, Any]) -> str:
    name: str = job.get("prefix", "").strip() or job["modes"][0]
    return name


def _own_jobs(
    bundle: Bundle, modes: Sequence[str], samples: Sequence[Sample], settings: Settings, base: Job
) -> list[Job]:
    job = job_of_bundle(bundle, settings.method, samples, settings)
    shared = [mode for mode in modes if not mode.startswith("transformers")]
    groups = ([shared] if shared else []) + [[mode] for mode in modes if mode not in shared]
    jobs = [{**job, "modes": group, "optional": settings.modes == "all" and group != shared} for group in groups]
    # Each of them with plain decoding in its own process: two processes of one graph differ by up to 25 %.
    both = ["plain", "speculative"]
    return jobs + [{**base, "modes": both, "method": name, "prefix": f"{name} "} for name in settings.also]


def job_of_bundle(bundle: Bundle, method: str | None, samples: Sequence[Sample], settings: Settings) -> Job:
    """Returns what a worker reads of a bundle, without modes; see `benchmark.worker`."""
    recipe = bundle.recipe
    draft = _draft_model(recipe.speculator) if method in (None, recipe.method) else None
    return {
        "modes": [],
        "bundle": str(bundle.path),
        "method": method,
        "threads": settings.threads or bundle.graph("target").tuning.get("threads") or 1,
        "prompts": [sample.ids for sample in samples],
        "max_new_tokens": settings.max_new_tokens,
        "target": recipe.target.model,
        "lora": recipe.target.lora,
        "draft": draft and draft.model,
        "draft_lora": draft and draft.lora,
        "assistant_tokens": settings.assistant_tokens,
        "eos_token_ids": list(bundle.eos_token_ids),
    }


def _draft_model(section: Mapping[str, Any]) -> GraphJob | None:
    from speccompile.core.jobs import DECODER
    from speccompile.runtime.engine import method_config

    name, config = method_config(section)
    return next((job for job in registry.method(name).graph_jobs(config) if job.source == DECODER), None)


def _report(
    runs: Runs,
    reference: Reference,
    groups: Mapping[str, Mapping[str, list[int]]],
    environment: dict[str, Any],
    eos_token_ids: Sequence[int],
) -> dict[str, Any]:
    summary = summary_from_runs(runs, reference.texts, eos_token_ids)
    environment["load_average_after"] = _load_average()
    return {
        "environment": environment,
        "reference": reference.record,
        "warnings": _warnings(environment, summary["modes"]),
        **summary,
        **figures_by_group(runs, groups, reference.texts, eos_token_ids),
    }


def _warnings(environment: Mapping[str, Any], modes: Mapping[str, Any]) -> list[str]:
    from speccompile.backends.machine import MAX_WAIT_SHARE
    from speccompile.runtime.synthetic import synthetic_note

    waited = max((mode["wait_share"] or 0.0 for mode in modes.values()), default=0.0)
    engine = environment["recipe"]["engine"]
    notes = [note] if (note := synthetic_note(engine.get("synthetic_acceptance", ()))) else []
    load = "".join(f", load average {load[0]:.1f}" for load in [environment["load_average_after"]] if load)
    what = (
        f"threads that decode waited for a CPU in {waited:.0%} of their time ({environment['num_cores']} cores{load})"
    )
    return [*notes, f"{what}: {_BUSY}"] if waited > MAX_WAIT_SHARE else notes


def _environment(bundle: Bundle, job: Job, num_prompts: int, settings: Settings) -> dict[str, Any]:
    from speccompile.backends.onnxruntime.tune import cpu_name

    return {
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {"speccompile": VERSION, **{p: v for p in PACKAGES if (v := package_version(p))}},
        "bundle": str(bundle.path),
        "git_sha": bundle.manifest.get("git_sha"),
        "recipe": bundle.manifest["recipe"],
        "forms": {name: graph.get("form") for name, graph in bundle.graphs.items()},
        "threads": job["threads"],
        "threads_from": "option" if settings.threads else "tuning",
        "num_prompts": num_prompts,
        "max_new_tokens": settings.max_new_tokens,
        "repeats": settings.repeats,
        "batch_size": 1,
        "assistant_tokens": settings.assistant_tokens,
        "load_average_before": _load_average(),
    }


def _load_average() -> list[float] | None:
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None
