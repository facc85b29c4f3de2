# SPDX-License-Identifier: Apache-2.0
"""speccompile profile: where the time of decoding goes, by engine, by file and by operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from speccompile.cli.options import MAX_THREADS, SOURCE_HELP, load_source, usable_threads, with_model_options
from speccompile.cli.output import errors_as_json, print_json
from speccompile.cli.prompts import check_results

if TYPE_CHECKING:
    from speccompile.runtime.spec_engine import SpecEngine

_PROMPT = "Write a function that adds two numbers:\n\ndef add("
_LEAST_SHARE = 0.005  # of a file that is printed


@with_model_options
def profile_command(
    source: Annotated[str, typer.Argument(metavar="MODEL", help=SOURCE_HELP)],
    model: Any,
    *,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="A text to continue.")] = _PROMPT,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to emit, greedily.")] = 256,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without drafts.")] = False,
    flame: Annotated[
        Path | None, typer.Option(help="Write the stacks into this file, for flamegraph.pl or speedscope.")
    ] = None,
    graph: Annotated[
        str | None, typer.Option(help="Also profile this graph by kind of operator, e.g. target (ONNX Runtime's CPU).")
    ] = None,
    nodes: Annotated[str, typer.Option(help="Comma-separated numbers of nodes of its steps.")] = "1,8",
    method: Annotated[str | None, typer.Option(help="Another speculation method than the recipe's.")] = None,
    backend: Annotated[str | None, typer.Option(help="Another backend than the recipe's.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=MAX_THREADS, help="Threads of the target's engine.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show where the time of decoding goes.

    One text is decoded to lay out memory, then with samples of the Python stack every 0.5 ms. Engines run in the file
    that calls them; their time is that of steps, the prompt left out.
    """
    counts = _read_counts(nodes)
    check_results(flame)
    with errors_as_json(as_json):
        engine, _ = load_source(source, model, method=method, backend=backend, threads=usable_threads(threads))
        found = _profile(engine, prompt, max_new_tokens, not plain, flame)
        if graph is not None:
            found["operators"] = _operators(engine, graph, counts, threads)
    if as_json:
        print_json(found)
    else:
        _print(Console(highlight=False), found, graph)


def _read_counts(nodes: str) -> list[int]:
    parts = [part.strip() for part in nodes.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise typer.BadParameter(f"got {nodes!r}; expected whole numbers from 1 to 1024", param_hint="--nodes")
    return [int(part) for part in parts]


def _profile(
    engine: SpecEngine, prompt: str, max_new_tokens: int, speculative: bool, flame: Path | None
) -> dict[str, Any]:
    from speccompile.benchmark.stacks import StackSampler
    from speccompile.core.sampling_params import SamplingParams

    text: str | list[int] = prompt if engine.tokenizer is not None else [1]

    def decode(num_tokens: int) -> tuple[dict[str, Any], dict[str, float]]:
        before = {one.spec.name: one.seconds for one in engine.engines}
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        [generation] = engine.generate([text], params, speculative=speculative)
        return generation.stats, {one.spec.name: one.seconds - before[one.spec.name] for one in engine.engines}

    decode(max_new_tokens)
    _, of_prompt = decode(min(max_new_tokens, 2))  # with one token a draft would not read it
    with StackSampler() as sampler:
        stats, whole = decode(max_new_tokens)
    if flame is not None:
        sampler.write(flame)
    counts = ("num_tokens", "num_steps", "num_draft_tokens", "num_accepted")
    names = (*counts, "prefill_ms", "step_ms", "outside_engine_ms")
    return {
        **{name: stats[name] for name in names},
        "engines_ms": _shares(stats["engine_ms"], whole, of_prompt),
        "num_samples": sampler.stacks.total(),
        "files": sampler.shares(),
    }


def _shares(engine_ms: float, whole: Mapping[str, float], of_prompt: Mapping[str, float]) -> dict[str, float]:
    # Returns the milliseconds of each engine in steps: their sum by what each took more than for the prompt.
    later = {name: max(seconds - of_prompt[name], 0.0) for name, seconds in whole.items()}
    parts = later if any(later.values()) else whole
    return {name: engine_ms * part / (sum(parts.values()) or 1.0) for name, part in parts.items()}


def _operators(engine: SpecEngine, graph: str, counts: list[int], threads: int | None) -> dict[str, Any]:
    from speccompile.benchmark.operators import profile_graph
    from speccompile.errors import RuntimeFault

    bundle = engine.bundle
    if bundle is None:
        raise RuntimeFault("--graph", "an engine without a bundle", "a bundle", "Leave --graph out.")
    num_threads = threads or bundle.graph("target").tuning.get("threads") or 1
    profiles = profile_graph(bundle, graph, counts, threads=num_threads)
    return {str(num): asdict(profile) for num, profile in profiles.items()}


def _print(console: Console, found: dict[str, Any], graph: str | None) -> None:
    steps = max(found["num_steps"], 1)
    parts = [f"{name} {ms / steps:.3f}" for name, ms in found["engines_ms"].items()]
    parts.append(f"outside of the engines {found['outside_engine_ms'] / steps:.3f}")
    console.print(
        f"{found['num_tokens']} tokens in {found['num_steps']} steps of {found['step_ms'] / steps:.3f} ms "
        f"({', '.join(parts)}); prompt {found['prefill_ms']:.1f} ms",
        soft_wrap=True,
    )
    files = Table("share", "file", box=None, header_style="dim")
    for name, share in found["files"].items():
        if share >= _LEAST_SHARE:
            files.add_row(f"{share:.1%}", name)
    console.print(files)
    if graph is None:
        return
    profiles = found["operators"]
    table = Table(f"{graph}, ms", *(f"{num} nodes" for num in profiles), box=None, header_style="dim")
    for label, key in (("a step", "off_ms"), ("a step, profiled", "step_ms")):
        table.add_row(label, *(f"{profile[key]:.3f}" for profile in profiles.values()))
    *_, last = profiles.values()
    for kind, (count, _) in last["kinds"].items():
        cells = [f"{profile['kinds'].get(kind, (0, 0.0))[1]:.3f}" for profile in profiles.values()]
        table.add_row(f"{kind} ({count})", *cells)
    console.print(table)
