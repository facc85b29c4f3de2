# SPDX-License-Identifier: Apache-2.0
"""Compare a bundle's greedy tokens with transformers' fp32 logits, every method at batch 1 and 8.

    python bench/greedy_equality.py BUNDLE --prompts FILE.jsonl [--methods none,mtp] [--max-new-tokens 128] [--limit N]
                                            [--forget-costs]

transformers reads each text that the bundle wrote in one forward. A text whose every token has the largest logit after
the tokens before it is its greedy text: what `generate` would write, at a small part of the time, where a step of it
gives the logits of that forward. Any other token is shown with its gap to the largest logit: one within float32
rounding of logits (about 1e-5) is a tie, anything larger is a fault. A text that ends early has to end with a token
that ends texts, and one that goes on must not contain one. Exit code 1 when there is a fault. The certificate
(`speccompile verify`) compares the bundle's own method with `generate`. An adapter (`target.lora`) that was merged into
the bundle's weights is merged into transformers' too.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import speccompile
from bench.methods import retune
from speccompile.bundle.bundle import Bundle, read_bundle
from speccompile.certificate.checkpoint import Reference, open_reference
from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.core.sampling import SamplingParams

METHODS = "none,draft_model,ngram"
MAX_TIE_GAP = 1e-4


def open_target(bundle: Bundle) -> Reference:
    """Returns the checkpoint of a bundle's target in transformers, float32, with the adapter of its recipe merged."""
    target = bundle.recipe.target
    if target.model is None:
        sys.exit(f"{bundle.path}: no checkpoint of its target")
    reference, why = open_reference(resolve_checkpoint(target.model), target.lora)
    if reference is None:
        sys.exit(why)
    return reference


def gaps_of(model: Any, prompt: Sequence[int], text: Sequence[int]) -> dict[int, float]:
    """Returns the gap between the largest logit and that of a token, by the index of each token that has another."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
    tokens = torch.tensor(list(text))
    own, most = logits.gather(1, tokens[:, None])[:, 0], logits.max(-1)
    return {int(i): float(most.values[i] - own[i]) for i in torch.nonzero(most.indices != tokens)[:, 0]}


def is_ended_well(text: Sequence[int], stops: Collection[int], max_new_tokens: int) -> bool:
    """Whether a text ends at its first token that ends texts, or at the most tokens."""
    first = next((i for i, token in enumerate(text) if token in stops), None)
    return len(text) == (max_new_tokens if first is None else first + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--methods", default=METHODS, help="comma-separated; none: plain decoding")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--forget-costs", action="store_true", help="draft always, also where it does not pay")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.forget_costs:
            args.bundle = shutil.copytree(args.bundle, Path(folder) / "bundle")
            retune(args.bundle, None)
        sys.exit(compare(args))


def compare(args: argparse.Namespace) -> int:
    """Prints the comparison; returns the exit code."""
    texts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()][: args.limit]
    model = open_target(read_bundle(args.bundle)).target.model
    ends = model.generation_config.eos_token_id
    stops = set(ends if isinstance(ends, list) else [ends]) - {None}
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    read: dict[tuple[int, ...], dict[int, float]] = {}  # by prompt and text: most methods write the same
    is_wrong, seconds = False, 0.0
    for method in args.methods.split(","):
        engine = speccompile.load(args.bundle, method=method)
        if args.forget_costs:
            engine.controller = None
        prompts = [engine.encode(text) for text in texts]
        for batch_size in (1, 8):
            results = engine.generate(prompts, params, batch_size=batch_size)
            num_tokens, num_equal, lines = 0, 0, []
            for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
                key, start = (*prompt, -1, *result.tokens), time.perf_counter()
                if key not in read:
                    read[key] = gaps_of(model, prompt, result.tokens)
                    seconds += time.perf_counter() - start
                num_tokens += len(result.tokens)
                is_whole = is_ended_well(result.tokens, stops, args.max_new_tokens)
                is_wrong |= not is_whole
                num_equal += is_whole and not read[key]
                if not is_whole:
                    lines.append(f"  prompt {index}: {len(result.tokens)} tokens, ended wrong: A FAULT")
                for at, gap in read[key].items():
                    is_tie = gap < MAX_TIE_GAP
                    is_wrong |= not is_tie
                    lines.append(f"  prompt {index}, token {at}: gap {gap:.2e}, {'a tie' if is_tie else 'A FAULT'}")
            drafted = sum(result.stats["num_draft_tokens"] for result in results)
            print(
                f"{method:12} batch {batch_size}: {num_equal} of {len(prompts)} texts equal, {num_tokens} tokens, ",
                end="",
            )
            print("\n".join([f"{drafted} drafted", *lines]), flush=True)
    print(f"transformers read {len(read)} different texts in {seconds:.0f} s")
    return int(is_wrong)


if __name__ == "__main__":
    main()
