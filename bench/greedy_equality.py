# SPDX-License-Identifier: Apache-2.0
"""Compare a bundle's greedy tokens with transformers' greedy fp32 `generate`, every method at batch 1 and 8.

    python bench/greedy_equality.py BUNDLE --prompts FILE.jsonl [--methods none,mtp] [--max-new-tokens 128] [--limit N]

A differing prompt is shown with the gap of transformers' two candidate logits at the first differing token: a gap
within float32 rounding of logits (about 1e-5) is a tie, anything larger is a fault. Exit code 1 when there is one.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import speccompile
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.bundle import read_bundle

METHODS = "none,draft_model,ngram"
MAX_TIE_GAP = 1e-4


def gap_of(model: Any, prompt: list[int], wanted: list[int], got: list[int]) -> tuple[int, float]:
    """Returns where two continuations part, and transformers' logit of its own token over the other one there."""
    pairs = zip(wanted, got, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(got)))
    if at >= min(len(wanted), len(got)):
        return at, float("inf")
    with torch.no_grad():
        logits = model(torch.tensor([prompt + wanted[:at]])).logits[0, -1]
    return at, float(logits[wanted[at]] - logits[got[at]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--methods", default=METHODS, help="comma-separated; none: plain decoding")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()

    texts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()][: args.limit]
    source = read_bundle(args.bundle).recipe.target.model
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    engines = {method: speccompile.load(args.bundle, method=method) for method in args.methods.split(",")}
    prompts = [engines["none"].encode(text) for text in texts]
    wanted = []
    start = time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        wanted.append(out[0, len(prompt) :].tolist())
    print(f"transformers: {len(prompts)} prompts in {time.perf_counter() - start:.0f} s")
    is_wrong = False
    for method, engine in engines.items():
        for batch_size in (1, 8):
            results = engine.generate(prompts, params, batch_size=batch_size)
            differing = [i for i, r in enumerate(results) if r.tokens != wanted[i]]
            print(f"{method:12} batch {batch_size}: {len(prompts) - len(differing)} of {len(prompts)} equal")
            for index in differing:
                at, gap = gap_of(model, prompts[index], wanted[index], results[index].tokens)
                is_tie = abs(gap) < MAX_TIE_GAP
                is_wrong |= not is_tie
                print(f"  prompt {index}, token {at}: gap {gap:.2e}, {'a tie' if is_tie else 'A FAULT'}")
    sys.exit(int(is_wrong))


if __name__ == "__main__":
    main()
