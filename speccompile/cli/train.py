# SPDX-License-Identifier: Apache-2.0
"""speccompile train: a recipe with a section `training` in, a speculator out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from speccompile.cli.output import ProgressDisplay, errors_as_json, open_display, print_json, quiet_libraries
from speccompile.cli.prompts import prompts_of_requests, read_requests
from speccompile.errors import RuntimeFault

if TYPE_CHECKING:
    from speccompile.recipe.training_plan import TrainingPlan


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
        from speccompile.training.run import Listener, train

        rows = _read_prompts(prompts, num_prompts, plan.target) if prompts is not None and _is_first() else []
        if _is_first():
            _print_intent(plan)
        with open_display() as display:
            try:
                result = train(loaded, plan, Listener(display.stage, display.step, display.saved))
            except (KeyboardInterrupt, SystemExit):
                _report_how_to_go_on(display, plan)
                raise
            if rows:
                from speccompile.training.reference import measure_chains

                result["chains"] = measure_chains(plan, rows, progress=display.stage)
    if as_json and _is_first():
        print_json(result)
    elif _is_first():
        _print_result(result, plan.output)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _read_prompts(path: Path, num: int, target: str | Path) -> list[list[int]]:
    # Returns the token ids of a file's first prompts.
    from speccompile.checkpoints.checkpoint import read_text_config
    from speccompile.checkpoints.folders import resolve_checkpoint
    from speccompile.common.tokenizer_file import encode_text
    from speccompile.training.text import read_tokenizer

    requests, folder = read_requests(path, num), resolve_checkpoint(str(target))
    tokenizer, size = read_tokenizer(folder)[0], int(read_text_config(folder)["vocab_size"])
    rows = []
    for request, prompt in zip(requests, prompts_of_requests(requests, tokenizer, folder), strict=True):
        ids = encode_text(tokenizer, prompt, request.where) if isinstance(prompt, str) else prompt
        if not ids or not 0 <= min(ids) <= max(ids) < size:
            expected = f"at least one token id, below {size}"
            raise RuntimeFault(request.where, str(ids)[:60], expected, "Correct the line.")
        rows.append(ids)
    return rows


def _print_intent(plan: TrainingPlan) -> None:
    section = plan.section
    stages = {name: getattr(section, name).steps for name in ("plain", "generated")}
    steps = ", ".join(f"{name} text {number} steps" for name, number in stages.items() if number)
    typer.echo(f"train {section.method} for {plan.target} into {plan.output}: {steps}", err=True)


def _report_how_to_go_on(display: ProgressDisplay, plan: TrainingPlan) -> None:
    if display.checkpoint is not None:
        typer.echo(f"The same command goes on from {display.checkpoint}, see {plan.output}.run", err=True)
    else:
        typer.echo("No checkpoint yet: the same command begins anew, with the texts that are kept", err=True)


def _print_result(result: dict[str, Any], output: Path) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    table = Table("stage", "seconds", "held-out loss", "agreement", "length", box=None, header_style="dim")
    for name, row in result["held_out"].items():
        cells = (" ".join(f"{value:.2f}" for value in row[key]) for key in ("loss", "agreement"))
        table.add_row(name, f"{result['seconds'][name]:.0f}", *cells, f"{row['acceptance_length']:.2f}")
    console.print(table)
    if result.get("frontier"):
        rows = Table("stage", "step", "length", "sampled length", "KL", "perplexity", box=None, header_style="dim")
        for row in result["frontier"]:
            lengths = (f"{row[name]:.2f}" for name in ("acceptance_length", "sampled_length"))
            perplexity = f"{row['perplexity']:.3f} ({row['base_perplexity']:.3f} before)"
            rows.add_row(row["stage"], str(row["step"]), *lengths, f"{row['kl']:.4f}", perplexity)
        console.print(rows)
        console.print(f"The changed target: target.lora: {output / 'adapter'}")
    if "chains" in result:
        chains = result["chains"]
        console.print(f"greedy chains: mean acceptance length {chains['mean_acceptance_length']:.2f}")
    console.print(f"{output}: config.json, model.safetensors, training.json, training.png")
