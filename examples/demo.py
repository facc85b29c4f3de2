#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo of `make demo`: build a recipe, generate from a prompt live, compare plain with speculative decoding.

python examples/demo.py [--recipe recipes/pycode-several.yaml] [--prompt TEXT] [--num-prompts 12]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speccompile.cli.bench_summary import Ratio
from speccompile.cli.bench_tables import figure, ratio_text

ROOT = Path(__file__).parents[1]
ROUNDS = 9  # of the comparison: seconds
PROMPT = '''def merge_sorted(left, right):
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:'''


def run_speccompile(*arguments: str | Path) -> None:
    """Run one command of this interpreter's speccompile, its output on this terminal."""
    command = [str(Path(sys.executable).with_name("speccompile")), *map(str, arguments)]
    print("\n$ speccompile " + " ".join(repr(a) if "\n" in a or " " in a else a for a in command[1:]), flush=True)
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def summary_from_bench(report: dict[str, Any]) -> str:
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes/pycode-several.yaml", help="what to build")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--num-prompts", type=int, default=12, help="prompts of the comparison")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args(argv)

    recipe = args.recipe.resolve()
    bundle = Path("bundles") / recipe.stem  # commands run in ROOT
    size = ("--max-new-tokens", str(args.max_new_tokens))
    run_speccompile("build", os.path.relpath(recipe, ROOT), "-o", bundle)
    run_speccompile("generate", bundle, "--prompt", args.prompt, *size, "--stats")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "bench.json"
        prompts = ("--prompts", "examples/prompts.jsonl", "--limit", str(args.num_prompts), "--repeats", str(ROUNDS))
        run_speccompile("bench", bundle, *prompts, *size, "--modes", "plain,speculative", "--json", report)
        print(f"\n{args.num_prompts} prompts, {args.max_new_tokens} new tokens each, greedy, batch 1, {ROUNDS} rounds:")
        print(summary_from_bench(json.loads(report.read_text())))


if __name__ == "__main__":
    main()
