# SPDX-License-Identifier: Apache-2.0
"""Mean acceptance length of the acceptance rules on the example pair: expectations along text that the target drew.

    python bench/acceptance_rules.py [--prompts 72] [--tokens 96] [--temperature 0.7,1] [--top-p 1]

Chains: `drawn` keeps each drawn draft with min(1, target / draft), `block` is block verification, `race` a draft that
races with the target's times over its own likeliest tokens (`--racers`), `likeliest` the draft's likeliest token.
Trees of the race: two children after each node, all scored (a bound for budgets). All rules see the same text; each
position gives the probability that its token is kept, over all draws of the rule. Steps start at every position. The
ratio of `race` to `drawn` has its standard error over prompts. No time is measured.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speccompile.drafting.race import NUM_RACERS, SHARPNESS

ROOT = Path(__file__).resolve().parents[1]
Row = NDArray[np.float64]


def race_probs(target: Row, rates: Row, candidates: NDArray[np.int64], token: int) -> tuple[float, float]:
    """Returns the probabilities that the emitted token is the first, and one of the first two, in the draft's race.

    With t the time of the token over its share, and given that it won the target's race, t is exponential, and another
    token y is ahead of it in the draft's race where E_y is between t target_y and t s_y, s_y the larger of target_y
    and target_token rates_y / rates_token. So none is ahead with probability 1 / S, where S is the sum of all s_y
    (Daliri et al. 2024), and y alone with 1 / (S - s_y + target_y) - 1 / S.

    Args:
        target: [vocab].
        rates: [candidates], of the draft.
        candidates: [candidates], the draft's likeliest tokens.
        token: emitted.
    """
    shares, is_token = target[candidates], candidates == token
    if not is_token.any() or not rates[is_token][0] > 0:
        return 0.0, 0.0
    slower = np.maximum(shares, target[token] * rates / rates[is_token])
    total = slower.sum() + 1 - shares.sum()
    alone = 1 / (total - slower + shares) - 1 / total
    return float(1 / total), float(1 / total + alone[~is_token].sum())


def keep_probs(target: Row, draft: Row, token: int, num_racers: int, exponent: float) -> dict[str, float]:
    """Returns the probability by rule that the emitted token of one position was kept, given the token."""
    candidates = np.argsort(-draft, kind="stable")[:num_racers]
    first, second = race_probs(target, draft[candidates] ** exponent, candidates, token)
    return {
        "drawn": min(1.0, draft[token] / target[token]),
        "race": first,
        "likeliest": float(candidates[0] == token),
        "race tree": second,
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


def cut(probs: Row, top_p: float) -> Row:
    """Returns a distribution cut by top-p."""
    if top_p >= 1:
        return probs / probs.sum()
    order = np.argsort(-probs, kind="stable")
    sums = np.cumsum(probs[order])
    kept = np.zeros_like(probs)
    kept[order[: np.searchsorted(sums, top_p) + 1]] = 1
    left: Row = probs * kept
    return left / left.sum()


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

    def text(
        self, prompt: str, num: int, temperature: float, top_p: float, rng: np.random.Generator
    ) -> tuple[list[int], int]:
        """Returns a prompt with the tokens that the target drew after it, and the size of the prompt."""
        tokens = list(self.tokenizer(prompt)["input_ids"])
        start, past, new = len(tokens), None, tokens
        with self.torch.no_grad():
            for _ in range(num):
                out = self.target(self.torch.tensor([new]), past_key_values=past, use_cache=True)
                past, logits = out.past_key_values, out.logits[0, -1].double() / temperature
                probs = cut(self.torch.softmax(logits, -1).numpy(), top_p)
                new = [int(rng.choice(len(probs), p=probs))]
                tokens += new
                if new[0] == self.tokenizer.eos_token_id:
                    break
        return tokens, start

    def dists(self, tokens: list[int], start: int, temperature: float, top_p: float) -> tuple[Row, Row]:
        """Returns the distributions of both models at every token from `start` on, [num, vocab] each."""
        with self.torch.no_grad():
            made = [model(self.torch.tensor([tokens])).logits[0, start - 1 : -1] for model in (self.target, self.draft)]
        target, draft = (self.torch.softmax(logits.double() / temperature, -1).numpy() for logits in made)
        return np.stack([cut(row, top_p) for row in target]), np.stack([cut(row, top_p) for row in draft])


def measure(pair: Pair, prompts: list[str], temperature: float, options: argparse.Namespace) -> None:
    """Prints a line for each number of drafts."""
    drafts = [int(n) for n in options.drafts.split(",")]
    totals: dict[tuple[int, str], list[tuple[float, int]]] = {}
    for number, prompt in enumerate(prompts):
        rng = np.random.default_rng([number, int(temperature * 100)])
        tokens, start = pair.text(prompt, options.tokens, temperature, options.top_p, rng)
        target, draft = pair.dists(tokens, start, temperature, options.top_p)
        given = list(enumerate(tokens[start:]))
        rows = [keep_probs(target[at], draft[at], token, options.racers, options.exponent) for at, token in given]
        ratios = np.array([target[at, token] / max(draft[at, token], 1e-300) for at, token in given])
        for num_drafts in drafts:
            for rule, (total, steps) in mean_lengths(rows, ratios, num_drafts).items():
                totals.setdefault((num_drafts, rule), []).append((steps + total, steps))
    for num_drafts in drafts:
        cells = {rule: np.array(rows) for (size, rule), rows in totals.items() if size == num_drafts}
        lengths = {rule: rows[:, 0].sum() / rows[:, 1].sum() for rule, rows in cells.items()}
        print(f"temperature {temperature}, {num_drafts} drafts on a path: ", end="")
        print(", ".join(f"{rule} {length:.3f}" for rule, length in lengths.items()), end="; ")
        ratio, error = ratio_of(cells["race"][:, 0], cells["drawn"][:, 0])
        print(f"race / drawn {ratio:.3f} +-{error:.3f}", flush=True)


def ratio_of(tokens: Row, others: Row) -> tuple[float, float]:
    """Returns the ratio of two sums over prompts, and its standard error."""
    ratio, num = tokens.sum() / others.sum(), len(tokens)
    spread = ((tokens - ratio * others) ** 2).sum() * num / max(num - 1, 1)
    return float(ratio), float(np.sqrt(spread) / others.sum())


def main() -> None:
    """Parses the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=ROOT / "examples/models/pycode-16m")
    parser.add_argument("--draft", type=Path, default=ROOT / "examples/models/pycode-16m-draft")
    parser.add_argument("--prompts", type=int, default=72)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", default="0.7,1")
    parser.add_argument("--drafts", default="3,6")
    parser.add_argument("--top-p", type=float, default=1.0, help="of both models")
    parser.add_argument("--racers", type=int, default=NUM_RACERS)
    parser.add_argument("--exponent", type=float, default=SHARPNESS)
    options = parser.parse_args()
    lines = (ROOT / "examples/prompts.jsonl").read_text().splitlines()[: options.prompts]
    pair = Pair(options.target, options.draft)
    for temperature in options.temperature.split(","):
        measure(pair, [json.loads(line)["prompt"] for line in lines], float(temperature), options)


if __name__ == "__main__":
    main()
