#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""speccompile from Python: load a bundle, generate a batch, stream one prompt.

Build the bundle first: speccompile build recipes/pycode.yaml -o bundles/pycode

    python examples/quick_start.py [BUNDLE]
"""

from __future__ import annotations

import sys

from speccompile import SamplingParams, load

STACK = """class Stack:
    def __init__(self):
        self._items = []

    def push(self, item):"""
READ = """def read_lines(path, encoding="utf-8"):
    with open(path, encoding=encoding) as handle:"""


def main() -> None:
    engine = load(sys.argv[1] if len(sys.argv) > 1 else "bundles/pycode")

    greedy = SamplingParams(max_new_tokens=48)
    for prompt, result in zip([STACK, READ], engine.generate([STACK, READ], greedy), strict=True):
        length, steps = result.stats["mean_acceptance_length"], result.stats["num_steps"]
        print(f"{prompt}{result.text}\n--- {steps} steps, {length:.2f} tokens a step, {result.finish_reason}\n")

    # Each request may have its own parameters; the same seed gives the same text in any batch.
    warm = [SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=seed) for seed in range(3)]
    for result in engine.generate([STACK] * 3, warm):
        print(repr(result.text))

    print("\nstreamed, one bar a step:")
    for step in engine.stream(READ, SamplingParams(max_new_tokens=32)):
        print(step.text, end="|", flush=True)
    print()


if __name__ == "__main__":
    main()
