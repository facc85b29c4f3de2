# SPDX-License-Identifier: Apache-2.0
"""speccompile replay: decodes recorded requests again and compares their texts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speccompile.cli.options import MAX_THREADS, SOURCE_HELP, load_source, usable_threads, with_model_options
from speccompile.cli.output import errors_as_json, open_display, print_json, print_warning
from speccompile.errors import RuntimeFault

if TYPE_CHECKING:
    from speccompile.runtime.record import Difference
    from speccompile.runtime.spec_engine import SpecEngine

_SHOWN = 8  # tokens of a text that differs


@with_model_options
def replay_command(
    record: Annotated[Path, typer.Argument(help="A file that `speccompile serve --record` wrote.")],
    source: Annotated[str, typer.Argument(metavar="MODEL", help=SOURCE_HELP)],
    model: Any,
    *,
    limit: Annotated[int | None, typer.Option(min=1, help="The first requests only.")] = None,
    speculation: Annotated[str, typer.Option(help="auto, on or off, where a request says nothing.")] = "auto",
    method: Annotated[str | None, typer.Option(help="Another speculation method than the recipe's.")] = None,
    backend: Annotated[str | None, typer.Option(help="Another backend than the recipe's.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=MAX_THREADS, help="Threads of the target's engine.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Decode recorded requests again and compare their texts, token by token.

    A text depends on its prompt, its sampling parameters and its seed alone: on the same bundle every text is equal,
    whatever the load, the drafts and the controller. Exit code 8 where one is not.
    """
    from speccompile.runtime.record import read_record, replay
    from speccompile.runtime.requests import SPECULATION
    from speccompile.runtime.service import Service, ServiceOptions

    chosen = next((name for name in SPECULATION if name == speculation), None)
    if chosen is None:
        raise typer.BadParameter(f"one of {', '.join(SPECULATION)}", param_hint="--speculation")
    with errors_as_json(as_json):
        found = read_record(record)
        recorded = found.recorded[:limit]
        engine, _ = load_source(source, model, method=method, backend=backend, threads=usable_threads(threads))
        if not found.is_of(engine.bundle):
            print_warning(f"recorded by another bundle or version (speccompile {found.origin['speccompile']})")
        num_outputs = sum(len(one.outputs) for one in recorded)
        options = ServiceOptions(max_queue=len(recorded) + 1, speculation=chosen)
        with Service(engine, options) as service, open_display() as display:
            stats: list[dict[str, Any]] = []
            differences = replay(
                service, recorded, lambda num: display.stage(f"replay: texts {num}/{num_outputs}"), stats.append
            )
    if as_json:
        results = [{"stats": one} for one in stats]
        rows = [asdict(difference) for difference in differences]
        print_json(
            {"num_texts": num_outputs, "num_left_out": found.num_left_out, "differences": rows, "results": results}
        )
    else:
        _print(engine, differences, num_outputs, found.num_left_out)
    if differences:
        raise typer.Exit(RuntimeFault.exit_code)


def _print(engine: SpecEngine, differences: list[Difference], num_outputs: int, num_left_out: int) -> None:
    for difference in differences:
        wanted, got = (_shown(engine, tokens) for tokens in (difference.wanted, difference.got))
        where = f"request {difference.line}, output {difference.output}, token {difference.at}"
        typer.echo(f"{where}: recorded {wanted}, now {got}")
    left_out = f"; {num_left_out} requests with images or errors are left out" if num_left_out else ""
    typer.echo(f"{num_outputs - len(differences)} of {num_outputs} texts are equal{left_out}")


def _shown(engine: SpecEngine, tokens: list[int]) -> str:
    from speccompile.runtime.text import text_of_tokens

    part = tokens[:_SHOWN]
    return str(part) if engine.tokenizer is None else repr(text_of_tokens(engine.tokenizer, part))
