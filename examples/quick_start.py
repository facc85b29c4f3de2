#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""speccompile from Python: load a bundle, generate a batch, stream one prompt.

Build the bundle first: speccompile build recipes/pycode.yaml -o bundles/pycode

    python examples/quick_start.py [BUNDLE]
"""

from __future__ import annotations

import sys

import speccompile
from speccompile.core.sampling import SamplingParams


def main() -> None:
    engine = speccompile.load(sys.argv[1] if len(sys.argv) > 1 else "bundles/pycode")

    greedy = SamplingParams(max_new_tokens=48)
    for result in engine.generate(["def parse_date(text):\n", "class LRUCache:\n"], greedy):
        print(result.text)
        print(f"-- {result.finish_reason}, {result.stats}\n")

    # Each request may have its own parameters; the same seed gives the same text in any batch.
    warm = [SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=seed) for seed in range(3)]
    for result in engine.generate(["def area("] * 3, warm):
        print(repr(result.text))

    for step in engine.stream("async def fetch(url):\n", SamplingParams(max_new_tokens=32)):
        print(step)


if __name__ == "__main__":
    main()
