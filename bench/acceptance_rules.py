# SPDX-License-Identifier: Apache-2.0
"""Mean acceptance length of the acceptance rules on the example pair: expectations along text that the target drew.

    python bench/acceptance_rules.py [--prompts 12] [--tokens 96] [--temperature 0.7,1] [--drafts 3,6]

Chains: `drawn` keeps each drawn draft with min(1, target / draft), `block` is block verification, `race` a draft that
races with the target's times over its own likeliest tokens (`--racers`), `likeliest` the draft's likeliest token.
Trees: two children after each node, all of them scored (a bound for node budgets). All rules see the same text; each
position gives the probability that its token is kept, the draws of the rule averaged (races: over 24 draws). Steps
start at every position. No time is measured.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speccompile.drafting.race import NUM_RACERS, SHARPNESS

ROOT = Path(__file__).resolve().parents[1]
NUM_RACES = 24
Row = NDArray[np.float64]


def drawn_tree(target: Row, draft: Row, token: int) -> float:
    """Returns the probability that one of two siblings, drawn without replacement, is kept, given `token`."""
    left = np.maximum(target - draft, 0)
    rest = left[token] / max(left.sum(), 1e-300)
    refused = np.maximum(draft - target, 0)
    refused[token] = 0
    second = (refused * np.minimum(draft[token] / np.maximum(1 - draft, 1e-300), rest)).sum()
    return float((min(target[token], draft[token]) + second) / target[token])


def race_ranks(target: Row, rates: Row, candidates: NDArray[np.int64], token: int, rng: np.random.Generator) -> Row:
    """Returns the ranks of the emitted token in the draft's race, for times given that it won the target's.

    Args:
        target: [vocab].
        rates: [candidates], of the draft.
        candidates: [candidates], the draft's likeliest tokens.
        token: emitted.
        rng: of the times.
    """
    is_token = candidates == token
    if not is_token.any():
        return np.full(NUM_RACES, len(candidates))
    shares, won = target[candidates], rng.exponential(size=(NUM_RACES, 1))
    times = np.where(is_token, won * shares, won * shares + rng.exponential(size=(NUM_RACES, len(candidates))))
    scores = times / rates
    ranks: Row = (scores < scores[:, is_token]).sum(axis=1)
    return ranks


def keep_probs(target: Row, draft: Row, token: int, num_racers: int, rng: np.random.Generator) -> dict[str, float]:
    """Returns the probability by rule that the emitted token of one position was kept, given the token."""
    candidates = np.argsort(-draft, kind="stable")[:num_racers]
    ranks = race_ranks(target, draft[candidates] ** SHARPNESS, candidates, token, rng)
    return {
        "drawn": min(1.0, draft[token] / target[token]),
        "race": float((ranks == 0).mean()),
        "likeliest": float(candidates[0] == token),
        "drawn tree": drawn_tree(target, draft, token),
        "race tree": float((ranks < 2).mean()),
        "likeliest tree": float(token in candidates[:2]),
    }


def mean_lengths(rows: list[dict[str, float]], ratios: Row, num_drafts: int) -> dict[str, tuple[float, int]]:
    """Returns the sum of kept drafts and the number of steps by rule, over all starts in one text."""
    starts = range(len(rows) - num_drafts)
    sums = dict.fromkeys((*rows[0], "block"), 0.0) if rows else {}
    for start in starts:
        window = rows[start : start + num_drafts]
        for rule in rows[0]:
            sums[rule] += float(np.cumprod([row[rule] for row in window]).sum())
        products = np.cumprod(ratios[start : start + num_drafts])
        sums["block"] += float((1 / np.maximum(1, np.maximum.accumulate(products))).sum())
    return {rule: (total, len(starts)) for rule, total in sums.items()}


class Pair:
    """Target and draft as torch modules, and their tokenizer."""

    def __init__(self, target: Path, draft: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.torch, self.tokenizer = torch, AutoTokenizer.from_pretrained(target)
        self.target, self.draft = (
            AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval() for p in (target, draft)
        )

    def text(self, prompt: str, num: int, temperature: float, rng: np.random.Generator) -> tuple[list[int], int]:
        """Returns a prompt with the tokens that the target drew after it, and the size of the prompt."""
        tokens = list(self.tokenizer(prompt)["input_ids"])
        start, past, new = len(tokens), None, tokens
        with self.torch.no_grad():
            for _ in range(num):
                out = self.target(self.torch.tensor([new]), past_key_values=past, use_cache=True)
                past, logits = out.past_key_values, out.logits[0, -1].numpy().astype(np.float64)
                new = [int((logits / temperature + rng.gumbel(size=len(logits))).argmax())]
                tokens += new
                if new[0] == self.tokenizer.eos_token_id:
                    break
        return tokens, start

    def dists(self, tokens: list[int], start: int, temperature: float) -> tuple[Row, Row]:
        """Returns the distributions of both models at every token from `start` on, [num, vocab] each."""
        with self.torch.no_grad():
            made = [model(self.torch.tensor([tokens])).logits[0, start - 1 : -1] for model in (self.target, self.draft)]
        target, draft = (self.torch.softmax(logits.double() / temperature, -1).numpy() for logits in made)
        return target, draft


def measure(pair: Pair, prompts: list[str], num: int, temperature: float, drafts: list[int], num_racers: int) -> None:
    """Prints a table."""
    totals: dict[tuple[int, str], list[float]] = {}
    for number, prompt in enumerate(prompts):
        rng = np.random.default_rng([number, int(temperature * 100)])
        tokens, start = pair.text(prompt, num, temperature, rng)
        target, draft = pair.dists(tokens, start, temperature)
        given = list(enumerate(tokens[start:]))
        rows = [keep_probs(target[at], draft[at], token, num_racers, rng) for at, token in given]
        ratios = np.array([target[at, token] / max(draft[at, token], 1e-300) for at, token in given])
        for num_drafts in drafts:
            for rule, (total, steps) in mean_lengths(rows, ratios, num_drafts).items():
                held = totals.setdefault((num_drafts, rule), [0.0, 0.0])
                held[0] += total
                held[1] += steps
    for num_drafts in drafts:
        cells = {rule: 1 + t / n for (size, rule), (t, n) in totals.items() if size == num_drafts}
        print(f"temperature {temperature}, {num_drafts} drafts on a path: ", end="")
        print(", ".join(f"{rule} {cells[rule]:.2f}" for rule in cells), flush=True)


def main() -> None:
    """Parses the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=ROOT / "examples/models/pycode-16m")
    parser.add_argument("--draft", type=Path, default=ROOT / "examples/models/pycode-16m-draft")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", default="0.7,1")
    parser.add_argument("--drafts", default="3,6")
    parser.add_argument("--racers", type=int, default=NUM_RACERS)
    options = parser.parse_args()
    lines = (ROOT / "examples/prompts.jsonl").read_text().splitlines()[: options.prompts]
    pair = Pair(options.target, options.draft)
    for temperature in options.temperature.split(","):
        prompts = [json.loads(line)["prompt"] for line in lines]
        measure(
            pair,
            prompts,
            options.tokens,
            float(temperature),
            [int(n) for n in options.drafts.split(",")],
            options.racers,
        )


if __name__ == "__main__":
    main()
