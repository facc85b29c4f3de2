#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of the acceptance rules: one target and draft model, the same graphs, prompt by prompt in turn.

    python bench/acceptance_times.py BUNDLE --prompts PROMPTS.jsonl [--limit 12] [--rounds 3] [--json OUT]

BUNDLE has a draft model with a fixed tree of two children (`speculator.tree: {widths: [2, 2, 2]}`), which can draft
chains as well, and room for 14 drafts. Rules: `plain` decoding; `block`, drawn chains, which are verified as a block;
`drawn`, trees whose drafts are drawn; `race`, drafts that race with the target's times, as servers
draft; `likeliest`, the draft's likeliest tokens. Every step has as many drafts as asked for; nothing decides to draft
less. Sampled texts differ between rules, so speeds are of all tokens of a rule over all its time, the prompts' own time
taken out; the error of the ratio to plain is its standard error by the bootstrap over prompts. At temperature 0 drawn
drafts are the likeliest ones.
"""

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import speccompile
from speccompile.certificate.decoding import make_sequences
from speccompile.core import registry
from speccompile.core.sampling_params import SamplingParams
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES
from speccompile.drafting import proposer as grown
from speccompile.drafting import static_tree
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch
from speccompile.runtime.spec_engine import SpecEngine

PLAIN = "plain"
SHAPES = {
    "chain of 3": [1, 1, 1],
    "chain of 6": [1] * 6,
    "tree of 3 levels, 14 drafts": [2, 2, 2],
    "tree of 6 levels, 12 drafts": [2, 1, 1, 1, 1, 1],
}
Runs = dict[tuple[str, str], dict[int, list[tuple[int, float, int]]]]
"""By drafts and rule, then prompt: tokens, seconds and steps of each round."""


def ways_of(engine: SpecEngine) -> dict[tuple[str, str], tuple[Any, bool]]:
    """Returns the proposer of each (drafts, rule), and whether drafts may not change sampled text."""
    assert engine.bundle is not None
    method, section = registry.method("draft_model"), engine.bundle.recipe.speculator
    fields = {key: value for key, value in section.items() if key != "method"}
    [job] = method.graph_jobs(method.Config(**fields))
    drafts = {job.name: engine.engines[1]}

    def proposer(**changed: Any) -> Any:
        return method.make_proposer(method.Config(**fields | changed), drafts, engine.context)

    ways: dict[tuple[str, str], tuple[Any, bool]] = {("none", PLAIN): (None, True)}
    for name, widths in SHAPES.items():
        tree, is_chain = {"widths": widths}, max(widths) == 1
        if is_chain:
            chain = {"tree": "chain", "num_draft_tokens": len(widths)}
            ways[name, "block"] = proposer(**chain, drafts="sampled"), False
            ways[name, "race"] = proposer(**chain, drafts="sampled"), True
            ways[name, "likeliest"] = proposer(**chain, drafts="greedy"), True
        else:
            ways[name, "drawn"] = proposer(tree=tree, drafts="sampled"), False
            ways[name, "race"] = proposer(tree=tree, drafts="sampled"), True
            ways[name, "likeliest"] = proposer(tree=tree, drafts="greedy"), True
    return ways


@contextmanager
def no_race() -> Iterator[None]:
    """Takes candidates in the draft's order: ours race wherever there are several."""

    def as_given(batch: Any, depth: int, outputs: Any, d2t: Any = None) -> Any:
        return np.asarray(outputs[CANDIDATES]), np.asarray(outputs[CANDIDATE_PROBS])

    name = "raced_candidates"
    with patch.object(grown, name, as_given), patch.object(static_tree, name, as_given):
        yield


def run_once(
    engine: SpecEngine, way: tuple[Any, bool], prompt: list[int], params: SamplingParams
) -> tuple[int, float, int]:
    """Decodes one prompt; returns the tokens after its first, the seconds of their steps, and the steps."""
    drafts, is_invariant = way
    plain = registry.method("none")
    proposer = drafts or plain.make_proposer(plain.Config(), {}, engine.context)
    waiting = make_sequences(engine, [prompt], [params], "on" if drafts else "off")
    engine.reset(len(prompt))
    for _ in decode(engine.verifier, proposer, SequenceBatch(list(waiting), 1, is_invariant), engine.engines):
        pass
    [sequence] = waiting
    if sequence.error is not None:
        raise RuntimeError(sequence.error)
    outcomes = sequence.stats.outcomes
    num_steps = sum(outcomes.values())
    return num_steps + sum(kept * count for (_, kept), count in outcomes.items()), sequence.stats.step_s, num_steps


def measure(engine: SpecEngine, prompts: list[list[int]], temperature: float, rounds: int, max_new_tokens: int) -> Runs:
    """Decodes every prompt in every way, ways in another order each time; the first round is not kept."""
    rng, ways = random.Random(0), ways_of(engine)
    runs: Runs = {way: defaultdict(list) for way in ways}
    for turn in range(rounds + 1):
        for index, prompt in enumerate(prompts):
            params = SamplingParams(
                max_new_tokens=max_new_tokens, temperature=temperature, seed=1000 * turn + index, ignore_eos=True
            )
            for way in rng.sample(list(ways), len(ways)):
                with no_race() if way[1] == "likeliest" else nullcontext():
                    made = run_once(engine, ways[way], prompt, params)
                if turn:
                    runs[way][index].append(made)
    return runs


def speed(of: dict[int, list[tuple[int, float, int]]], prompts: Iterable[int]) -> float:
    """Returns tokens per second over some prompts."""
    rounds = [made for prompt in prompts for made in of[prompt]]
    return sum(tokens for tokens, _, _ in rounds) / sum(seconds for _, seconds, _ in rounds)


def row_of(runs: Runs, way: tuple[str, str]) -> dict[str, Any]:
    """Returns the mean acceptance length, tokens/s and the ratio to plain decoding of a way."""
    of, plain, rng = runs[way], runs["none", PLAIN], random.Random(1)
    rounds = [made for prompt in of.values() for made in prompt]
    resampled = [rng.choices(list(of), k=len(of)) for _ in range(400)]
    return {
        "drafts": way[0],
        "rule": way[1],
        "mean_acceptance_length": sum(made[0] for made in rounds) / sum(made[2] for made in rounds),
        "tokens_per_s": speed(of, of),
        "ratio": speed(of, of) / speed(plain, of),
        "error": statistics.stdev(speed(of, some) / speed(plain, some) for some in resampled) if len(of) > 1 else None,
    }


def main() -> None:
    """Measures a bundle at each temperature, and prints Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperatures", default="0,0.7,1")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lines = args.prompts.read_text().splitlines()[: args.limit]
    engine = speccompile.load(args.bundle, threads=args.threads)
    prompts = [json.loads(line)["prompt_ids"] for line in lines]
    found: dict[str, list[dict[str, Any]]] = {}
    for temperature in args.temperatures.split(","):
        runs = measure(engine, prompts, float(temperature), args.rounds, args.max_new_tokens)
        found[temperature] = rows = [row_of(runs, way) for way in runs]
        print(f"\ntemperature {temperature}\n\n| drafts | rule | length | tokens/s | to plain |\n|---|---|---|---|---|")
        for row in rows:
            error = "" if row["error"] is None else f" +-{row['error']:.2f}"
            numbers = f"{row['mean_acceptance_length']:.2f} | {row['tokens_per_s']:.0f} | {row['ratio']:.2f}{error}"
            print(f"| {row['drafts']} | {row['rule']} | {numbers} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
