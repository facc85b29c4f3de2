#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a bundle's drafters alone and together, on the same engines, prompt by prompt.

    python bench/hybrid.py BUNDLE --prompts PROMPTS.jsonl [--limit 24] [--rounds 3] [--max-new-tokens 128] [--json OUT]

Plain decoding, each drafter and all of them together decode each prompt in turn, in another order each time, so that a
load on the machine favours none. Every way has its own costs and controller, which a round without measurement warms
up. Speeds are of decoding alone, the prompt's own time taken out. A class of prompts is the value of `kind` in its row.
`ratio` is the hybrid's speed over that of the best drafter alone, whose own speed on these prompts is greatest; `error`
its standard error by the bootstrap over prompts.
"""

import argparse
import json
import random
import statistics
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import speccompile
from speccompile.core import registry
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.spec_engine import SpecEngine

PLAIN, TOGETHER = "plain", "together"


def ways_of(engine: SpecEngine) -> dict[str, SpecEngine]:
    """Returns an engine for each way over the graphs of one: the hybrid, each of its drafters, and plain decoding."""
    assert engine.bundle is not None
    ways, sections = {PLAIN: engine, TOGETHER: engine}, engine.bundle.recipe.speculator["drafters"]
    target, *rest = engine.engines
    drafts = dict(zip(_graphs(engine), rest, strict=True))
    for section in sections:
        method = registry.method(section["method"])
        config = method.Config(**{key: value for key, value in section.items() if key != "method"})
        proposer = method.make_proposer(config, drafts, engine.context)
        ways[section["method"]] = SpecEngine(
            target, drafts, proposer, engine.tokenizer, engine.context, engine.eos_token_ids, may_stop=True
        )
    return ways


def _graphs(engine: SpecEngine) -> list[str]:
    assert engine.bundle is not None
    recipe = engine.bundle.recipe
    method = registry.method(recipe.method)
    config = method.Config(drafters=recipe.speculator["drafters"])
    return [job.name for job in method.graph_jobs(config) if job.name in engine.bundle.graphs]


def measure(ways: dict[str, SpecEngine], rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Returns {way: {prompt: [(tokens, seconds, mean acceptance length) of each round]}}."""
    params, rng = SamplingParams(max_new_tokens=args.max_new_tokens, ignore_eos=True), random.Random(0)
    runs: dict[str, Any] = {name: defaultdict(list) for name in ways}
    texts: dict[int, list[int]] = {}
    start_s = perf_counter()
    for turn in range(args.rounds + 1):
        for index, row in enumerate(rows):
            if turn and perf_counter() - start_s > args.most_seconds:
                return runs
            for name in rng.sample(list(ways), len(ways)):
                engine = ways[name]
                [made] = engine.generate([row["prompt_ids"]], params, speculative=name != PLAIN)
                assert texts.setdefault(index, made.tokens) == made.tokens, f"{name}: another text"
                stats = made.stats
                if turn:
                    seconds = (stats["time_ms"] - stats["prefill_ms"]) / 1e3
                    runs[name][index].append((stats["num_tokens"], seconds, stats["mean_acceptance_length"]))
    return runs


def speed(runs: dict[int, list[Any]], prompts: list[int]) -> float:
    """Returns tokens per second over prompts, each with the median of its rounds."""
    tokens = sum(runs[p][0][0] for p in prompts)
    return tokens / sum(statistics.median(seconds for _, seconds, _ in runs[p]) for p in prompts)


def compare(runs: dict[str, Any], prompts: list[int]) -> dict[str, Any]:
    """Returns the speeds of all ways over these prompts, and the ratio of the hybrid to the best of its drafters."""
    speeds = {name: speed(of, prompts) for name, of in runs.items()}
    best = max((name for name in runs if name not in (PLAIN, TOGETHER)), key=speeds.__getitem__)
    rng, ratios = random.Random(1), []
    for _ in range(400):
        some = rng.choices(prompts, k=len(prompts))
        ratios.append(speed(runs[TOGETHER], some) / speed(runs[best], some))
    lengths = {name: statistics.fmean(length for p in prompts for _, _, length in of[p]) for name, of in runs.items()}
    return {
        "num_prompts": len(prompts),
        "tokens_per_s": speeds,
        "mean_acceptance_length": lengths,
        "best": best,
        "ratio": speeds[TOGETHER] / speeds[best],
        "error": statistics.stdev(ratios) if len(prompts) > 1 else None,
        "ratio_to_plain": speeds[TOGETHER] / speeds[PLAIN],
    }


def main() -> None:
    """Measures a bundle, and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--most-seconds", type=float, default=3600, help="begin no prompt after this time")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()][: args.limit]
    ways = ways_of(speccompile.load(args.bundle, threads=args.threads))
    runs = measure(ways, rows, args)
    classes: dict[str, list[int]] = {"all": sorted(runs[TOGETHER])}
    for index in classes["all"]:
        classes.setdefault(rows[index].get("kind", "other"), []).append(index)
    found = {name: compare(runs, prompts) for name, prompts in classes.items()}
    print(f"| prompts | {' | '.join(f'{name} tokens/s (length)' for name in runs)} | ratio | to plain |")
    print("|---|" + "---|" * (len(runs) + 2))
    for name, row in found.items():
        cells = [f"{row['tokens_per_s'][way]:.1f} ({row['mean_acceptance_length'][way]:.2f})" for way in runs]
        ratio = f"{row['ratio']:.3f}" + ("" if row["error"] is None else f" +-{row['error']:.3f}")
        print(f"| {name} ({row['num_prompts']}) | {' | '.join(cells)} | {ratio} | {row['ratio_to_plain']:.2f} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
