# SPDX-License-Identifier: Apache-2.0
"""speccompile generate: texts from a bundle, live on a terminal, as JSON for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from speccompile.cli.prompts import Request, read_requests, write_results
from speccompile.errors import RuntimeFault

if TYPE_CHECKING:
    from speccompile.core.sampling import SamplingParams
    from speccompile.runtime.slots import Step
    from speccompile.runtime.spec_engine import Generation, SpecEngine

STYLES = {"accepted": "green", "recovered": "yellow", "bonus": "cyan", "plain": ""}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(name="generate")(generate_command)


def generate_command(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="One prompt.")] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="A file with one JSON object a line.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens to emit.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Keep the k most probable tokens; 0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set with this mass; 1 is off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens this near to the likeliest; 0 is off.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="On tokens of prompt and text; 1 is off.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="On tokens that the text has; 0 is off.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="As often as the text has them; 0 is off.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; repeatable.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print counts and times.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without drafts.")] = False,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write results to this file; - is stdout.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences decoded at once.")] = 1,
    method: Annotated[str | None, typer.Option(help="Another speculation method than the recipe's.")] = None,
    backend: Annotated[str | None, typer.Option(help="Another backend than the recipe's.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the target's engine.")] = None,
) -> None:
    """Continue one prompt or a file of prompts.

    On a terminal the text is coloured as it comes: accepted drafts green, recovered tokens yellow, bonus tokens cyan.
    """
    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("give either --prompt or --prompts")
    requests = [Request(prompt, {})] if prompt is not None else read_requests(prompts or Path())
    from speccompile.runtime.engine import load

    engine = load(bundle, backend=backend, threads=threads, method=method)
    flags = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop": tuple(stop) if stop else None,
    }
    given: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    defaults = replace(engine.defaults, **given)
    sampling = [_sampling(index, defaults, request) for index, request in enumerate(requests)]
    results = _generate(engine, requests, sampling, not plain, batch_size, json_out)
    if json_out is not None:
        write_results(json_out, [result.json_from_generation() for result in results])
    if stats:
        _print_stats(Console(stderr=json_out is not None and str(json_out) == "-"), results)


def _sampling(index: int, defaults: SamplingParams, request: Request) -> SamplingParams:
    try:
        return replace(defaults, **request.overrides)
    except RuntimeFault as fault:
        raise RuntimeFault(f"prompt {index} ({fault.where})", fault.got, fault.expected, fault.todo) from fault


def _generate(
    engine: SpecEngine,
    requests: Sequence[Request],
    sampling: Sequence[SamplingParams],
    speculative: bool,
    batch_size: int,
    json_out: Path | None,
) -> list[Generation]:
    """Decode, showing text as it comes on a terminal, else a progress bar and the texts at the end."""
    prompts = [request.prompt for request in requests]
    console = Console(highlight=False, soft_wrap=True)
    shows_text = json_out is None or (len(requests) == 1 and str(json_out) != "-")
    if shows_text and console.is_terminal and batch_size == 1:
        return _generate_live(engine, prompts, sampling, speculative, console)
    results: dict[int, Generation] = {}
    run = engine.run(prompts, sampling, speculative=speculative, batch_size=batch_size)
    with Progress(console=Console(stderr=True), transient=True, disable=len(requests) == 1) as bar:
        task = bar.add_task("generate", total=len(requests))
        for index, generation in run:
            results[index] = generation
            bar.advance(task)
    ordered = [results[index] for index in range(len(requests))]
    if shows_text:
        for index, (given, result) in enumerate(zip(prompts, ordered, strict=True)):
            if len(requests) > 1:
                console.print(Text(f"--- {index}", style="dim"))
            print(f"{given if isinstance(given, str) else ''}{result.text}")
    return ordered


def _generate_live(
    engine: SpecEngine,
    prompts: Sequence[str | list[int]],
    sampling: Sequence[SamplingParams],
    speculative: bool,
    console: Console,
) -> list[Generation]:
    results = []
    for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        if len(prompts) > 1:
            console.print(Text(f"--- {index}", style="dim"))
        console.print(Text(prompt if isinstance(prompt, str) else f"{len(prompt)} tokens", style="dim"), end="")
        painter = engine.text_sink(params)
        stream = engine.stream(prompt, params, speculative=speculative)
        for step in stream:
            for token, kind in zip(step.tokens, _kinds(step), strict=True):
                text = painter.push((token,))[0] if painter is not None else f" {token}"
                console.print(Text(text, style=STYLES[kind]), end="")
            if step.finish_reason and painter is not None:
                console.print(Text(painter.finish()), end="")
        console.print()
        if stream.generation is not None:
            results.append(stream.generation)
    legend = [Text.assemble(("■ ", style), name) for name, style in STYLES.items() if style]
    if speculative:
        console.print(Text("  ").join(legend))
    return results


def _kinds(step: Step) -> list[str]:
    """What each token of a step is: drafts first, then the one that the target gave."""
    kinds = ["accepted"] * step.num_accepted
    last = "bonus" if step.is_bonus else "recovered" if step.num_draft_tokens else "plain"
    return [*kinds, last][: len(step.tokens)]


def _print_stats(console: Console, results: Sequence[Generation]) -> None:
    rows = [result.stats for result in results]

    def total(key: str) -> float:
        return float(sum(row[key] for row in rows))

    steps, tokens = total("num_steps"), total("num_tokens")
    tried = max((len(row["acceptance_by_position"]) for row in rows), default=0)
    facts: list[tuple[str, Any]] = [
        ("prompts", len(rows)),
        ("new tokens", f"{tokens:.0f}"),
        ("target steps", f"{steps:.0f}"),
        ("draft tokens", f"{total('num_draft_tokens'):.0f}, accepted {total('num_accepted'):.0f}"),
        ("mean acceptance length", f"{1 + total('num_accepted') / steps if steps else 1:.2f}"),
        ("deepest draft", tried),
        ("tokens/s while decoding", f"{tokens / total('step_ms') * 1e3 if total('step_ms') else 0:.1f} a sequence"),
        ("outside the engine", f"{100 * total('outside_engine_ms') / total('step_ms') if steps else 0:.1f} %"),
        ("prefill", f"{total('prefill_ms'):.0f} ms"),
    ]
    table = Table(show_header=False, box=None)
    for name, value in facts:
        table.add_row(Text(name, style="dim"), str(value))
    console.print(table)
