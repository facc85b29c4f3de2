# SPDX-License-Identifier: Apache-2.0
"""speccompile bench: plain against speculative decoding and against transformers, interleaved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from speccompile.cli.options import MAX_THREADS, usable_threads
from speccompile.cli.output import print_warning
from speccompile.cli.prompts import Request, check_results, prompts_of_bundle, read_requests, write_results
from speccompile.common.chat_prompts import CHATS
from speccompile.errors import BundleError, RuntimeFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speccompile.benchmark.samples import Sample
    from speccompile.bundle.bundle import Bundle


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
    assistant_tokens: Annotated[int, typer.Option(min=1, help="Draft length of transformers-assisted.")] = 4,
    also: Annotated[
        str | None, typer.Option(help="More speculation methods of ours, comma-separated, a process each.")
    ] = None,
    reference: Annotated[
        bool, typer.Option(help="Compare texts with transformers' in float32, which decodes each prompt once (kept).")
    ] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this file, .svg or .png.")] = None,
) -> None:
    """Measure greedy decoding at batch 1.

    Plain and speculative decoding share an engine, every other mode has a process of its own; they take turns prompt by
    prompt, and a process that waits is stopped. Sampling fields of the prompts are not used. Whatever the bundle's
    precision, texts are compared with transformers' greedy ones in float32.
    """
    from speccompile.benchmark.measure import Settings, measure, read_methods
    from speccompile.benchmark.plot import check_plot, draw_report
    from speccompile.benchmark.samples import read_lengths, samples_from_prompts
    from speccompile.benchmark.tables import print_report
    from speccompile.bundle.bundle import read_bundle

    if (prompts is None) == (categories is None):
        raise typer.BadParameter("give either --prompts or --categories")
    check_results(json_out)
    check_plot(plot)
    more, threads = read_methods(also), usable_threads(threads)
    opened = read_bundle(bundle)
    read = read_samples(opened, prompts, categories, limit)
    lengths = read_lengths(context_lengths, opened.recipe.engine.max_seq_len, max_new_tokens)
    settings = Settings(modes, method, more, max_new_tokens, repeats, threads, assistant_tokens, reference)
    report = measure(opened, samples_from_prompts(read, lengths), lengths, settings, warn=print_warning)
    if json_out is not None:
        write_results(json_out, report)
    if plot is not None:
        draw_report(report, plot)
    print_report(Console(stderr=json_out is not None and str(json_out) == "-"), report)


def read_samples(bundle: Bundle, prompts: Path | None, categories: str | None, limit: int | None) -> list[Sample]:
    """Returns the prompts of a file, or those of some categories, as token ids.

    Args:
        prompts: None: those of `categories`.
        categories: comma-separated; conversations where the bundle has a chat template, else texts to be continued.
        limit: at most so many prompts of the file, or of each category.

    Raises:
        RuntimeFault: the file is wrong, there is no such category, or the bundle has no tokenizer for texts.
    """
    from speccompile.benchmark.samples import Sample
    from speccompile.common.tokenizer_file import knows_chats

    if prompts is not None:
        requests = read_requests(prompts, limit)
    else:
        requests = read_categories(str(categories), knows_chats(bundle.tokenizer_folder), limit)
    tokens = _token_ids(bundle, requests)
    return [Sample(ids, request.category) for ids, request in zip(tokens, requests, strict=True)]


def read_categories(names: str, has_template: bool, limit: int | None = None) -> list[Request]:
    """Returns the prompts of some categories, one category after the other; see `read_samples`."""
    from speccompile.benchmark.samples import TEXTS

    requests = read_requests(CHATS if has_template else TEXTS)
    known = list(dict.fromkeys(str(request.category) for request in requests))
    chosen = known if names.strip() == "all" else [name.strip() for name in names.split(",") if name.strip()]
    if not chosen or any(name not in known for name in chosen):
        kind = "with" if has_template else "without"
        expected = f"all, or some of {', '.join(known)} (of a model {kind} a chat template)"
        raise RuntimeFault("--categories", repr(names), expected, "Correct the option.")
    return [one for name in known if name in chosen for one in [r for r in requests if r.category == name][:limit]]


def _token_ids(bundle: Bundle, requests: Sequence[Request]) -> list[list[int]]:
    from speccompile.common.tokenizer_file import encode_text, load_tokenizer

    prompts = prompts_of_bundle(bundle, requests)
    if not any(isinstance(prompt, str) for prompt in prompts):
        return [list(prompt) for prompt in prompts if isinstance(prompt, list)]
    if bundle.tokenizer_path is None:
        raise RuntimeFault(str(bundle.path), "no tokenizer", "prompts of token ids", "Write lists of ids as prompts.")
    tokenizer = load_tokenizer(bundle.tokenizer_path, BundleError, "Build the bundle again.")
    return [encode_text(tokenizer, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
