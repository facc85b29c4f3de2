#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mean acceptance length of drafters trained by one recipe with each loss: same text, same steps, same seeds.

    python bench/losses.py RECIPE... --output FOLDER [--seeds 0,1] [--losses kl,lk_hybrid] [--set KEY=VALUE]

A name of a loss is one of `training.loss`, with `+chain` for `training.chain_weights: true`. Lengths are of held-out
text after the last stage: `greedy` counts drafts that are the target's first choice, `drawn` sums up the probabilities
that chains of drafts drawn at temperature 1 are accepted (the target's distribution on its most probable tokens, scaled
to one). `gain` is that of `drawn` over the first loss, averaged over seeds; `spread` the standard
deviation of the gain. A run that has ended is not done again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from speccompile.recipe import load_recipe
from speccompile.recipe.training_plan import resolve_training
from speccompile.training.run import Listener, train

CHAIN = "+chain"
LOSSES = ("kl", "kl+chain", "lk", "lk+chain", "lk_hybrid", "lk_hybrid+chain")


def run(recipe: Path, loss: str, seed: int, output: Path, overrides: list[str]) -> dict[str, Any]:
    """Returns the held-out measures at the end of one training run."""
    chained = str(loss.endswith(CHAIN)).lower()
    own = [f"training.loss={loss.removesuffix(CHAIN)}", f"training.chain_weights={chained}", f"training.seed={seed}"]
    loaded = load_recipe(recipe, [*overrides, *own])
    result = train(loaded, resolve_training(loaded, output / f"{recipe.stem}-{loss}-{seed}"), Listener())
    last = list(result["held_out"].values())[-1]
    return {"greedy": last["acceptance_length"], "drawn": last["sampled_length"], "acceptance": last["acceptance"]}


def rows_of(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns a row of the table for each loss.

    Args:
        found: by loss the measures of its runs, in the order of the seeds.
    """
    base = next(iter(found.values()))
    rows = []
    for loss, runs in found.items():
        shares = zip(*(one["acceptance"] for one in runs), strict=True)
        gains = [one["drawn"] / other["drawn"] - 1 for one, other in zip(runs, base, strict=True)]
        rows.append(
            {
                "loss": loss,
                "greedy": statistics.fmean(one["greedy"] for one in runs),
                "drawn": statistics.fmean(one["drawn"] for one in runs),
                "gain": statistics.fmean(gains),
                "spread": statistics.stdev(gains) if len(gains) > 1 else None,
                "acceptance": [statistics.fmean(values) for values in shares],
            }
        )
    return rows


def text_of(rows: list[dict[str, Any]]) -> str:
    lines = ["| loss | greedy | drawn | gain | spread | acceptance by position |", "|---|---|---|---|---|---|"]
    for row in rows:
        spread = "-" if row["spread"] is None else f"{100 * row['spread']:.1f} %"
        shares = " ".join(f"{value:.3f}" for value in row["acceptance"])
        gain = f"{100 * row['gain']:+.1f} %"
        lines.append(f"| {row['loss']} | {row['greedy']:.3f} | {row['drawn']:.3f} | {gain} | {spread} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the losses of training by acceptance length.")
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder of the trained speculators")
    parser.add_argument("--seeds", default="0", help="by commas (default %(default)s)")
    parser.add_argument("--losses", default=",".join(LOSSES), help="by commas (default %(default)s)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="write all measures")
    args = parser.parse_args()
    held: dict[str, Any] = {}
    for recipe in args.recipes:
        held[recipe.stem] = found = {}
        for loss in args.losses.split(","):
            runs = [run(recipe, loss, int(seed), args.output, args.overrides) for seed in args.seeds.split(",")]
            found[loss] = runs
            print(f"{recipe.stem} {loss}: drawn {' '.join(str(one['drawn']) for one in runs)}", flush=True)
        print(f"\n{recipe.stem}\n\n{text_of(rows_of(found))}\n", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
