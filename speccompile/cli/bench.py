# SPDX-License-Identifier: Apache-2.0
"""speccompile bench: plain against speculative decoding and against transformers, interleaved."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from speccompile.cli.bench_peers import ENVIRONMENTS, PEERS, PRECISIONS
from speccompile.cli.options import MAX_THREADS, usable_threads
from speccompile.cli.output import print_warning
from speccompile.cli.prompts import Request, check_results, prompts_of_bundle, read_requests, write_results
from speccompile.common.tokenizer_file import encode_text, load_tokenizer
from speccompile.errors import BundleError, RuntimeFault
from speccompile.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from speccompile.bundle.bundle import Bundle
    from speccompile.cli.bench_peers import Peer
    from speccompile.cli.bench_reference import Reference
    from speccompile.cli.bench_rounds import Runs
    from speccompile.core.jobs import GraphJob

MODES = ("plain", "speculative", "transformers", "transformers-assisted")
_BUSY = "figures beside other work are those of a busy machine; end it and measure again."
PACKAGES = ("numpy", "onnxruntime", "tokenizers", "torch", "transformers")


def register(app: typer.Typer) -> None:
    app.command(name="bench")(bench_command)


def bench_command(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A file with one JSON object a line; `category` groups them.")
    ] = None,
    categories: Annotated[
        str | None,
        typer.Option(help="In its place our own chats, texts where there is no template: `all`, or e.g. code,maths."),
    ] = None,
    context_lengths: Annotated[
        str | None, typer.Option(help="Comma-separated tokens: every prompt after others of its category, cut to each.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to emit for each prompt.")] = 128,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write results to this file; - is stdout.")] = None,
    modes: Annotated[str, typer.Option(help="Comma-separated modes; `all` leaves out what cannot run here.")] = "all",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians of them, with their spread.")] = 5,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use the first prompts only; with --categories of each category.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=MAX_THREADS, help="Threads of every mode; as measured by default.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Another speculation method than the recipe's.")] = None,
    assistant_tokens: Annotated[
        int, typer.Option(min=1, help="Draft length of transformers-assisted and of the peers.")
    ] = 4,
    peers: Annotated[
        str | None, typer.Option(help=f"Also other engines on the same checkpoint: `all` or some of {','.join(PEERS)}.")
    ] = None,
    peer_precisions: Annotated[
        str | None, typer.Option(help=f"Of {','.join(PRECISIONS)}; the bundle's own by default.")
    ] = None,
    also: Annotated[
        str | None, typer.Option(help="More speculation methods of ours, comma-separated, a process each.")
    ] = None,
    peers_dir: Annotated[Path, typer.Option(help="Where `make peers` made their environments.")] = ENVIRONMENTS,
    reference: Annotated[
        bool,
        typer.Option(help="Compare texts with transformers' in float32, which decodes each prompt once (kept)."),
    ] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this file, .svg or .png.")] = None,
) -> None:
    """Measure greedy decoding at batch 1.

    Plain and speculative decoding share an engine, every other mode has a process of its own; they take turns prompt by
    prompt, and a process that waits is stopped. Sampling fields of the prompts are not used. Whatever the bundle's
    precision, texts are compared with transformers' greedy ones in float32.
    """
    from speccompile.bundle.bundle import read_bundle
    from speccompile.cli.bench_categories import (
        Sample,
        groups_from_samples,
        read_lengths,
        samples_from_prompts,
    )
    from speccompile.cli.bench_peers import read_peers
    from speccompile.cli.bench_plot import check_plot, draw_report
    from speccompile.cli.bench_reference import find_reference, not_run, reference_of_round
    from speccompile.cli.bench_rounds import open_workers, run_rounds
    from speccompile.cli.bench_tables import print_report
    from speccompile.common.template_files import knows_chats

    if (prompts is None) == (categories is None):
        raise typer.BadParameter("give either --prompts or --categories")
    check_results(json_out)
    check_plot(plot)
    more = _read_methods(also)
    installed, left_out = read_peers(peers, peers_dir) if peers else ([], {})
    threads = usable_threads(threads)
    opened = read_bundle(bundle)
    requests = _read_requests(prompts, categories, limit, knows_chats(opened.tokenizer_folder))
    lengths = read_lengths(context_lengths, opened.recipe.engine.max_seq_len, max_new_tokens)
    chosen = _choose_modes(modes, opened, method)
    num_threads = threads or opened.graph("target").tuning.get("threads") or 1
    tokens = _token_ids(opened, requests)
    prompts_read = [Sample(ids, request.category) for ids, request in zip(tokens, requests, strict=True)]
    samples = samples_from_prompts(prompts_read, lengths)
    ids = [sample.ids for sample in samples]
    shared = [mode for mode in chosen if not mode.startswith("transformers")]
    groups = ([shared] if shared else []) + [[mode] for mode in chosen if mode not in shared]
    base = _job([], opened, None, num_threads, ids, max_new_tokens, assistant_tokens)
    jobs = [_job(modes, opened, method, num_threads, ids, max_new_tokens, assistant_tokens) for modes in groups]
    jobs = [{**job, "optional": modes == "all" and job["modes"] != shared} for job in jobs]
    # Each of them beside plain decoding of its own process: two processes of one graph differ by up to 25 %.
    jobs += [{**base, "modes": ["plain", "speculative"], "method": name, "prefix": f"{name} "} for name in more]
    if peers:
        jobs += _jobs_of_peers(base, opened, installed, peer_precisions, peers_dir, left_out)
    environment = _environment(opened, num_threads, threads, len(ids), max_new_tokens, repeats, assistant_tokens)
    if (load := environment["load_average_before"]) and load[0] > (environment["num_cores"] or 1):
        print_warning(f"the load average is {load[0]:.1f} on {environment['num_cores']} cores: {_BUSY}")
    right = not_run("--no-reference") if not reference else None
    with Progress(console=Console(stderr=True), transient=True) as bar:
        if right is None and MODES[2] not in chosen:
            task = bar.add_task("texts of transformers in float32", total=len(ids))
            right = find_reference(opened, base, lambda prompt: bar.advance(task))
            bar.remove_task(task)
        loading = bar.add_task("load", total=None)
        with open_workers(jobs, lambda job, error: left_out.update({_name(job): str(error)})) as workers:
            bar.remove_task(loading)
            num_modes = sum(len(worker.modes) for worker in workers)
            task = bar.add_task("measure", total=num_modes * len(ids) * repeats)
            runs = run_rounds(workers, len(ids), repeats, lambda mode: bar.advance(task))
    if right is None:
        right = reference_of_round(runs[MODES[2]][0]) if MODES[2] in runs else not_run(left_out[MODES[2]])
    report = _report(runs, right, groups_from_samples(samples, lengths), environment, opened.eos_token_ids)
    report["left_out"] = left_out
    if peers:
        report["peers"] = _peers_report(report["modes"], opened, method, installed, left_out)
    if json_out is not None:
        write_results(json_out, report)
    if plot is not None:
        draw_report(report, plot)
    print_report(Console(stderr=json_out is not None and str(json_out) == "-"), report)


def _name(job: Mapping[str, Any]) -> str:
    name: str = job.get("prefix", "").strip() or job["modes"][0]
    return name


def _report(
    runs: Runs,
    reference: Reference,
    groups: Mapping[str, Mapping[str, list[int]]],
    environment: dict[str, Any],
    eos_token_ids: Sequence[int],
) -> dict[str, Any]:
    from speccompile.cli.bench_categories import figures_by_group
    from speccompile.cli.bench_summary import summary_from_runs

    found = summary_from_runs(runs, reference.texts, eos_token_ids)
    environment["load_average_after"] = _load_average()
    return {
        "environment": environment,
        "reference": reference.record,
        "warnings": _warnings(environment, found["modes"]),
        **found,
        **figures_by_group(runs, groups, reference.texts, eos_token_ids),
    }


def _warnings(environment: Mapping[str, Any], modes: Mapping[str, Any]) -> list[str]:
    from speccompile.backends.contention import MAX_WAIT_SHARE

    waited = max((mode["wait_share"] or 0.0 for mode in modes.values()), default=0.0)
    load = "".join(f", load average {load[0]:.1f}" for load in [environment["load_average_after"]] if load)
    told = (
        f"threads that decode waited for a CPU in {waited:.0%} of their time ({environment['num_cores']} cores{load})"
    )
    return [f"{told}: {_BUSY}"] if waited > MAX_WAIT_SHARE else []


def _read_methods(names: str | None) -> list[str]:
    """Returns the methods of `--also`.

    Raises:
        RecipeError: there is no such method; the nearest name is suggested.
        RuntimeFault: one of them is named twice, or drafts nothing.
    """
    from speccompile.core import registry

    found = [name.strip() for name in (names or "").split(",") if name.strip()]
    for name in found:
        registry.method(name)
    if len(set(found)) < len(found) or "none" in found:
        expected = "speculation methods, each once"
        raise RuntimeFault("--also", repr(names), expected, "Plain decoding stands beside each of them in any case.")
    return found


def _read_requests(
    prompts: Path | None, categories: str | None, limit: int | None, has_template: bool
) -> list[Request]:
    if prompts is not None:
        return read_requests(prompts, limit)
    from speccompile.cli.bench_categories import read_categories

    return read_categories(str(categories), has_template, limit)


def _choose_modes(wanted: str, bundle: Bundle, method: str | None) -> list[str]:
    from speccompile.cli.bench_reference import why_no_transformers

    is_plain = (method or bundle.recipe.method) == "none"
    possible = [m for m in MODES if not (is_plain and m in ("speculative", "transformers-assisted"))]
    if wanted == "all":
        return [m for m in possible if not m.startswith("transformers") or why_no_transformers(bundle) is None]
    chosen = [m.strip() for m in wanted.split(",") if m.strip()]
    for mode in chosen:
        if mode not in possible:
            raise typer.BadParameter(f"got {mode!r}; expected some of {', '.join(possible)}", param_hint="--modes")
        if mode.startswith("transformers") and (why := why_no_transformers(bundle)) is not None:
            raise RuntimeFault(f"--modes {mode}", why, "the target in transformers", "Mend it, or leave the mode out.")
    if not chosen or len(set(chosen)) < len(chosen):
        expected = f"some of {', '.join(possible)}, each once"
        raise typer.BadParameter(f"got {wanted!r}; expected {expected}", param_hint="--modes")
    return chosen


def _token_ids(bundle: Bundle, requests: Sequence[Request]) -> list[list[int]]:
    prompts = prompts_of_bundle(bundle, requests)
    if not any(isinstance(prompt, str) for prompt in prompts):
        return [list(prompt) for prompt in prompts if isinstance(prompt, list)]
    if bundle.tokenizer_path is None:
        raise RuntimeFault(str(bundle.path), "no tokenizer", "prompts of token ids", "Write lists of ids as prompts.")
    tokenizer = load_tokenizer(bundle.tokenizer_path, BundleError, "Build the bundle again.")
    return [encode_text(tokenizer, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _job(
    modes: list[str],
    bundle: Bundle,
    method: str | None,
    threads: int,
    prompts: list[list[int]],
    max_new_tokens: int,
    assistant_tokens: int,
) -> dict[str, Any]:
    recipe = bundle.recipe
    draft = _draft_model(recipe.speculator) if method in (None, recipe.method) else None
    return {
        "modes": modes,
        "bundle": str(bundle.path),
        "method": method,
        "threads": threads,
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "target": recipe.target.model,
        "lora": recipe.target.lora,
        "draft": draft and draft.model,
        "draft_lora": draft and draft.lora,
        "assistant_tokens": assistant_tokens,
        "eos_token_ids": list(bundle.eos_token_ids),
    }


def _draft_model(section: Mapping[str, Any]) -> GraphJob | None:
    """Returns the job of the first drafter that is a language model of its own; None: no other engine has its kind."""
    from speccompile.core import registry
    from speccompile.core.jobs import DECODER
    from speccompile.runtime.engine import method_config

    name, config = method_config(section)
    return next((job for job in registry.method(name).graph_jobs(config) if job.source == DECODER), None)


def _jobs_of_peers(
    base: dict[str, Any],
    bundle: Bundle,
    installed: list[Peer],
    precisions: str | None,
    folder: Path,
    left_out: dict[str, str],
) -> list[dict[str, Any]]:
    from speccompile.cli.bench_peers import peer_jobs, read_precisions

    target = bundle.recipe.target
    if (lora := target.lora or base.get("draft_lora")) is not None:
        todo = "Merge it with PEFT and build the merged checkpoint, or leave --peers out."
        raise RuntimeFault("--peers", f"a bundle with the adapter {lora}", "a checkpoint as it is", todo)
    if target.weights != "checkpoint" or target.model is None or not Path(target.model).exists():
        got = f"no trained checkpoint's folder at {target.model}"
        todo = "Put it where it was at the build (of a GGUF file: speccompile convert), or leave --peers out."
        raise RuntimeFault("--peers", got, "the checkpoint that the bundle was built from", todo)
    return peer_jobs(installed, read_precisions(precisions, bundle), base, folder / "models", left_out)


def _peers_report(
    modes: dict[str, Any], bundle: Bundle, method: str | None, installed: list[Peer], left_out: dict[str, str]
) -> dict[str, Any]:
    from speccompile.cli.bench_peers import comparison_rows, precision_from_bundle

    precision = precision_from_bundle(bundle)
    return {
        "precision": precision,
        "rows": comparison_rows(modes, method or bundle.recipe.method, precision, installed),
        "versions": {peer.name: dict(peer.versions) for peer in installed},
        "left_out": left_out,
    }


def _environment(
    bundle: Bundle,
    threads: int,
    asked: int | None,
    num_prompts: int,
    max_new_tokens: int,
    repeats: int,
    assistant_tokens: int,
) -> dict[str, Any]:
    from speccompile.backends.onnxruntime.tune import cpu_name

    return {
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {"speccompile": VERSION, **{p: v for p in PACKAGES if (v := _version(p))}},
        "bundle": str(bundle.path),
        "git_sha": bundle.manifest.get("git_sha"),
        "recipe": bundle.manifest["recipe"],
        "forms": {name: graph.get("form") for name, graph in bundle.graphs.items()},
        "threads": threads,
        "threads_from": "option" if asked else "tuning",
        "num_prompts": num_prompts,
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "batch_size": 1,
        "assistant_tokens": assistant_tokens,
        "load_average_before": _load_average(),
    }


def _load_average() -> list[float] | None:
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
