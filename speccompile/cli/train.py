# SPDX-License-Identifier: Apache-2.0
"""speccompile train: a recipe with a section `training` in, a speculator out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from speccompile.cli.output import errors_as_json, print_json, quiet_libraries

if TYPE_CHECKING:
    from speccompile.training.run import Listener

_LINES = 50  # steps between two lines where there is no terminal


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(name="train")(train_command)


def train_command(
    recipe: Annotated[Path, typer.Argument(help="A recipe with a section training, see recipes/train/.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The speculator's folder; the recipe's by default.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. training.seed=1.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Afterwards measure greedy chains on these prompts (.jsonl).")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Most prompts that are measured.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a speculator.

    A run that was stopped goes on where its last checkpoint is (in OUTPUT.run) and gives the same curve. Several
    processes: torchrun --nproc-per-node N -m speccompile train RECIPE.
    """
    # Huge pages for torch's tensors, read when torch is loaded: small ones cost more than the arithmetic.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from speccompile.recipe import load_recipe
    from speccompile.recipe.training_plan import resolve_training

    quiet_libraries()
    with errors_as_json(as_json):
        loaded = load_recipe(recipe, overrides or ())
        plan = resolve_training(loaded, output.absolute() if output is not None else None)
        from speccompile.training.run import train

        with _watched() as listener:
            result = train(loaded, plan, listener)
        if prompts is not None and _is_first():
            from speccompile.training.reference import measure_chains

            result["chains"] = measure_chains(plan, prompts, num_prompts)
    if as_json and _is_first():
        print_json(result)
    elif _is_first():
        _print_result(result, plan.output)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _watched() -> Iterator[Listener]:
    """A listener that shows a bar on a terminal, and lines elsewhere."""
    from speccompile.training.run import Listener

    console = Console(stderr=True, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("train", total=None)
        yield Listener(_stage_teller(console, bar, task), _step_teller(console, bar, task))


def _stage_teller(console: Console, bar: Progress, task: Any) -> Callable[[str], None]:
    told = ""

    def tell(message: str) -> None:
        nonlocal told
        head = message.rstrip("0123456789/").rstrip()
        if head != told and not console.is_terminal:
            console.print(message, highlight=False)
        told = head
        bar.update(task, description=message, completed=0, total=None)

    return tell


def _step_teller(console: Console, bar: Progress, task: Any) -> Callable[[str, int, int, dict[str, Any]], None]:
    def tell(name: str, step: int, steps: int, row: dict[str, Any]) -> None:
        shown = _text_from_measures(row["train"])
        bar.update(task, description=f"{name} {shown}", completed=step, total=steps)
        if "held_out" in row:
            console.print(f"{name} {step}/{steps} held out: {_text_from_measures(row['held_out'])}", highlight=False)
        elif not console.is_terminal and step % _LINES == 0:
            console.print(f"{name} {step}/{steps} {shown}", highlight=False)

    return tell


def _text_from_measures(row: dict[str, Any]) -> str:
    """Losses and agreement by position, and the estimated acceptance length."""
    losses, agreement = (" ".join(f"{value:.2f}" for value in row[key]) for key in ("loss", "agreement"))
    return f"loss {losses} | agreement {agreement} | length {row['acceptance_length']:.2f}"


def _print_result(result: dict[str, Any], output: Path) -> None:
    console = Console(soft_wrap=True, highlight=False)
    table = Table("stage", "seconds", "held-out loss", "agreement", "length", box=None, header_style="dim")
    for name, row in result["held_out"].items():
        cells = (" ".join(f"{value:.2f}" for value in row[key]) for key in ("loss", "agreement"))
        table.add_row(name, f"{result['seconds'][name]:.0f}", *cells, f"{row['acceptance_length']:.2f}")
    console.print(table)
    if "chains" in result:
        chains = result["chains"]
        console.print(f"greedy chains: mean acceptance length {chains['mean_acceptance_length']:.2f}")
    console.print(f"{output}: config.json, model.safetensors, training.json, training.png")
