# SPDX-License-Identifier: Apache-2.0
"""Compare a bundle's greedy tokens with transformers' greedy fp32 tokens, every method at batch 1 and 8.

    python bench/greedy_equality.py BUNDLE --prompts FILE.jsonl [--methods none,mtp] [--max-new-tokens 128] [--limit N]

A differing prompt is shown with the gap of transformers' two candidate logits at the first differing token: a gap
within float32 rounding of logits is a tie, anything larger is a fault. Exit code 1 when there is one. The certificate
(`speccompile verify`) has the same comparison for the bundle's own method.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import speccompile
from speccompile.certificate.checkpoint import find_checkpoint, open_reference
from speccompile.certificate.ties import find_divergences
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.bundle import read_bundle

METHODS = "none,draft_model,ngram"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--methods", default=METHODS, help="comma-separated; none: plain decoding")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()

    texts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()][: args.limit]
    folder, why = find_checkpoint(read_bundle(args.bundle))
    reference, why = (None, why) if folder is None else open_reference(folder)
    if reference is None:
        sys.exit(why)
    params = SamplingParams(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    engines = {method: speccompile.load(args.bundle, method=method) for method in args.methods.split(",")}
    prompts = [next(iter(engines.values())).encode(text) for text in texts]
    start = time.perf_counter()
    wanted = [reference.greedy(prompt, args.max_new_tokens) for prompt in prompts]
    print(f"transformers: {len(prompts)} prompts in {time.perf_counter() - start:.0f} s")
    is_wrong = False
    for method, engine in engines.items():
        for batch_size in (1, 8):
            results = engine.generate(prompts, params, batch_size=batch_size)
            found = find_divergences(prompts, wanted, [r.tokens for r in results], reference.last_logits)
            print(f"{method:12} batch {batch_size}: {len(prompts) - len(found)} of {len(prompts)} equal")
            for d in found:
                is_wrong |= not d.is_tie
                gap = "unknown" if d.gap is None else f"{d.gap:.2e}"
                print(f"  prompt {d.prompt}, token {d.position}: gap {gap}, {'a tie' if d.is_tie else 'A FAULT'}")
    sys.exit(int(is_wrong))


if __name__ == "__main__":
    main()
