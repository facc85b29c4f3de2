# SPDX-License-Identifier: Apache-2.0
"""speccompile generate: texts from a bundle, live on a terminal, as JSON for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speccompile.cli.options import (
    MAX_THREADS,
    SOURCE_HELP,
    check_sampling,
    check_template,
    load_source,
    usable_threads,
    with_model_options,
    with_sampling_options,
)
from speccompile.cli.output import open_display, print_warning
from speccompile.cli.prompts import Request, check_results, read_requests, write_results
from speccompile.errors import RuntimeFault

if TYPE_CHECKING:
    from speccompile.core.sampling_params import SamplingParams
    from speccompile.runtime.images import Image
    from speccompile.runtime.requests import Generation
    from speccompile.runtime.spec_engine import SpecEngine, Stream
    from speccompile.runtime.text import TextSink

STYLES = {"accepted": "green", "recovered": "yellow", "bonus": "cyan", "plain": ""}


@with_model_options
@with_sampling_options
def generate_command(
    source: Annotated[str, typer.Argument(metavar="MODEL", help=SOURCE_HELP)],
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT]", help="What the model is asked; without a chat template, what it continues."),
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The same as TEXT.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="A file with one JSON object a line: `prompt`, a text as it is, or `messages`."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue TEXT as it is, where the model has a chat template too.")
    ] = False,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="An image of --prompt (PNG, JPEG or WebP); once for each mark in it, in their order."),
    ] = None,
    *,
    sampling: dict[str, Any],
    model: Any,
    stats: Annotated[bool, typer.Option("--stats", help="Print counts and times.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the tree of each step, why it was drafted and what was accepted.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without drafts.")] = False,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write results to this file; - is stdout.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences decoded at once; as many as the bundle has slots by default.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Another speculation method than the recipe's.")] = None,
    backend: Annotated[str | None, typer.Option(help="Another backend than the recipe's.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=MAX_THREADS, help="Threads of the target's engine.")] = None,
) -> None:
    """Answer or continue one prompt or a file of prompts.

    TEXT is a user's message where the model has a chat template, and is continued as it is where it has none. One text
    is shown as it comes, on a terminal in colours: accepted drafts green, recovered tokens yellow, bonus tokens cyan.
    A model or a recipe is built first, into $SPECCOMPILE_CACHE (~/.cache/speccompile).
    """
    if [text, prompt, prompts].count(None) != 2:
        raise typer.BadParameter("give one of TEXT, --prompt and --prompts")
    check_sampling(sampling)
    check_results(json_out)
    text = prompt if text is None else text
    if text is None and (image or raw):
        instead = "lines of a file have `images`" if image else "in a file `prompt` is a text as it is"
        raise typer.BadParameter(f"give {'--image' if image else '--raw'} with one text; {instead}")
    requests = [Request(text, {}, images=tuple(image or ()))] if text is not None else read_requests(prompts or Path())
    if explain and len(requests) > 1:
        raise typer.BadParameter("give --explain with one prompt")
    if any(request.messages for request in requests):
        check_template(source, model)
    options: dict[str, Any] = {"method": method, "backend": backend, "threads": usable_threads(threads)}
    engine, _ = load_source(source, model, **options, allow_synthetic_acceptance=True)
    if batch_size is not None and batch_size > engine.context.max_slots:
        expected = f"at most {engine.context.max_slots}, the bundle's engine.max_batch_size"
        raise typer.BadParameter(f"got {batch_size}; expected {expected}", param_hint="--batch-size")
    defaults = replace(engine.defaults, **sampling)
    params = [_sampling(index, defaults, request) for index, request in enumerate(requests)]
    if text is not None and not raw:
        requests = [_as_chat(engine, requests[0])]
    if explain:
        results = [_explain(engine, requests[0], params[0], not plain, is_shown=json_out is None)]
    else:
        results = _generate(engine, requests, params, not plain, batch_size, json_out)
    if json_out is not None:
        write_results(json_out, [result.json_from_generation() for result in results])
        if str(json_out) != "-":
            typer.echo(f"results: {json_out}", err=True)
    _print_early_ends(results, engine.context.max_seq_len)
    for index, result in enumerate(results):
        if result.error is not None:
            typer.echo(f"error: prompt {index}: {result.error}", err=True)
    if stats:
        console = Console(stderr=json_out is not None and str(json_out) == "-")
        from speccompile.runtime.draft_report import report_from_planner

        rows = [result.stats for result in results]
        drafted, accepted = (sum(row[key] for row in rows) for key in ("num_draft_tokens", "num_accepted"))
        drafts = report_from_planner(engine.controller, drafted, accepted, "off" if plain else "auto")
        print_stats(console, rows, drafts.sentence)
    if any(result.error is not None for result in results):
        raise typer.Exit(RuntimeFault.exit_code)


def _sampling(index: int, defaults: SamplingParams, request: Request) -> SamplingParams:
    try:
        return replace(defaults, **request.overrides)
    except RuntimeFault as fault:
        raise RuntimeFault(f"prompt {index} ({fault.where})", fault.got, fault.expected, fault.todo) from fault


def _as_chat(engine: SpecEngine, request: Request) -> Request:
    from speccompile.common.tokenizer_file import knows_chats

    if engine.bundle is not None and knows_chats(engine.bundle.tokenizer_folder):
        return replace(request, messages=({"role": "user", "content": request.prompt},))
    typer.echo("no chat template: the text is continued as it is", err=True)
    return request


def _generate(
    engine: SpecEngine,
    requests: Sequence[Request],
    sampling: Sequence[SamplingParams],
    speculative: bool,
    batch_size: int | None,
    json_out: Path | None,
) -> list[Generation]:
    """Decode; one text is shown as it comes, of several each when it is whole, in their order."""
    prompts = [_prompt_of(engine, request) for request in requests]
    shown = [_shown(request) for request in requests]
    images = [engine.read_images(request.images) for request in requests]
    console = Console(highlight=False, soft_wrap=True)
    shows_text = json_out is None or (len(requests) == 1 and str(json_out) != "-")
    if shows_text and (len(requests) == 1 or (console.is_terminal and batch_size == 1)):
        return _generate_live(engine, prompts, shown, images, sampling, speculative, console)
    results: dict[int, Generation] = {}
    num_shown, num_prompts = 0, len(prompts)
    run = engine.run(prompts, sampling, images=images, speculative=speculative, batch_size=batch_size)
    with open_display() as display:
        tell = display.stage if num_prompts > 1 else lambda message: None
        tell(f"generate: prompts 0/{num_prompts}")
        for index, generation in run:
            results[index] = generation
            tell(f"generate: prompts {len(results)}/{num_prompts}")
            while shows_text and not console.is_terminal and num_shown in results:
                _print_whole(console, num_shown, shown[num_shown], results[num_shown])
                num_shown += 1
    if shows_text:  # on a terminal: when the bar is gone
        for index in range(num_shown, num_prompts):
            _print_whole(console, index, shown[index], results[index])
    return [results[index] for index in range(num_prompts)]


def _explain(
    engine: SpecEngine, request: Request, params: SamplingParams, speculative: bool, is_shown: bool
) -> Generation:
    """Decodes one prompt; prints each step on stderr as it ends, and the text last."""
    from speccompile.runtime.draft_report import ExplainedPlanner, explain_step
    from speccompile.runtime.text import text_of_token

    planner = None if engine.controller is None else ExplainedPlanner(engine.controller, engine.proposer)
    constant = "their number is fixed" if speculative else "drafts off: --plain"
    engine.controller = planner
    images = engine.read_images(request.images)
    stream = engine.stream(
        _prompt_of(engine, request), params, images=images, speculative=speculative, wants_trace=True
    )
    for number, step in enumerate(stream, 1):
        reason = planner.reason(step) if planner is not None and speculative else constant
        last = step.trace.next_token if step.trace is not None else 0
        text = repr(text_of_token(engine.tokenizer, last)) if engine.tokenizer is not None else str(last)
        typer.echo(explain_step(number, step, reason, text), err=True)
    assert stream.generation is not None
    if is_shown:
        print(f"{_shown(request)}{stream.generation.text}", flush=True)
    return stream.generation


def _prompt_of(engine: SpecEngine, request: Request) -> str | list[int]:
    if not request.messages:
        return request.prompt
    where, num_images = f"{request.where} (messages)", len(request.images)
    return engine.chat_prompt(request.messages, request.variables, num_images=num_images, where=where)


def _shown(request: Request) -> str:
    return request.prompt if isinstance(request.prompt, str) and not request.messages else ""


def _print_whole(console: Console, index: int, shown: str, result: Generation) -> None:
    console.print(Text(f"--- {index}", style="dim"))
    print(f"{shown}{result.text}", flush=True)


def _generate_live(
    engine: SpecEngine,
    prompts: Sequence[str | list[int]],
    shown: Sequence[str],
    images: Sequence[Sequence[Image]],
    sampling: Sequence[SamplingParams],
    speculative: bool,
    console: Console,
) -> list[Generation]:
    results = []
    for index, (prompt, before, params, found) in enumerate(zip(prompts, shown, sampling, images, strict=True)):
        if len(prompts) > 1:
            console.print(Text(f"--- {index}", style="dim"))
        stream = engine.stream(prompt, params, images=found, speculative=speculative)
        if console.is_terminal:
            _paint(console, before, stream, engine.text_sink(params, stream.prompt))
        else:
            _write(before, stream)
        if stream.generation is not None:
            results.append(stream.generation)
    has_colours = console.is_terminal and console.color_system is not None and not console.no_color
    if speculative and has_colours:
        console.print(Text("  ").join(Text.assemble(("■ ", style), name) for name, style in STYLES.items() if style))
    return results


def _paint(console: Console, shown: str, stream: Stream, sink: TextSink | None) -> None:
    console.print(Text(shown, style="dim"), end="")
    for step in stream:
        for token, kind in zip(step.tokens, step.kinds, strict=True):
            text = sink.push((token,))[0] if sink is not None else f" {token}"
            console.print(Text(text, style=STYLES[kind]), end="")
        if step.finish_reason and sink is not None:
            console.print(Text(sink.finish()), end="")
    console.print()


def _write(shown: str, stream: Stream) -> None:
    print(shown, end="", flush=True)
    for step in stream:
        print(step.text, end="", flush=True)
    print(flush=True)


def _print_early_ends(results: Sequence[Generation], max_seq_len: int) -> None:
    num_full = sum(result.finish_reason == "cache_full" for result in results)
    if num_full:
        what = "the text ends" if len(results) == 1 else f"{num_full} of {len(results)} texts end"
        print_warning(f"{what} where the cache ends: engine.max_seq_len is {max_seq_len}, the prompt included")


def print_stats(console: Console, rows: Sequence[Mapping[str, Any]], drafts: str) -> None:
    """Prints counts and times over several texts, and whether drafts are on."""

    def total(key: str) -> float:
        return float(sum(row[key] for row in rows))

    steps, tokens = total("num_steps"), total("num_tokens")
    in_steps = tokens - total("num_first_tokens")
    tried = max((len(row["acceptance_by_position"]) for row in rows), default=0)
    facts: list[tuple[str, Any]] = [
        ("prompts", len(rows)),
        ("new tokens", f"{tokens:.0f}"),
        ("target steps", f"{steps:.0f}"),
        ("draft tokens", f"{total('num_draft_tokens'):.0f}, accepted {total('num_accepted'):.0f}"),
        ("mean acceptance length", f"{1 + total('num_accepted') / steps if steps else 1:.2f}"),
        ("tokens of the longest draft", str(tried)),
        ("tokens/s while decoding", f"{in_steps / total('step_ms') * 1e3 if total('step_ms') else 0:.1f} a sequence"),
        ("time outside the engines", f"{100 * total('outside_engine_ms') / total('step_ms') if steps else 0:.1f} %"),
        ("prefill", f"{total('prefill_ms'):.0f} ms"),
    ]
    table = Table(show_header=False, box=None)
    for name, value in facts:
        table.add_row(Text(name, style="dim"), str(value))
    console.print(table)
    console.print(Text(drafts), soft_wrap=True)
