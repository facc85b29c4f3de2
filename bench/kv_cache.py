# SPDX-License-Identifier: Apache-2.0
"""int8 caches beside float ones: perplexity over long texts, bytes, milliseconds of a step at a context.

    python bench/kv_cache.py FLOAT_BUNDLE INT8_BUNDLE [--text FILE ...] [--window 2048] [--context 2000] [--threads 1]

Both bundles have one model and one quantisation. The text (the pages of docs/explanation by default) is cut into
windows, each read from its first token on; every position is compared. Steps of both take turns; medians.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from speccompile import load
from speccompile.backends.distance import compare, distance_from_rows
from speccompile.core.specs import LENGTHS, LOGITS, TOKENS, all_sure

PAGES = Path(__file__).parents[1] / "docs/explanation"
CHUNK, NODES = 128, (1, 4, 8, 16)


def step(engine: Any, tokens: np.ndarray, length: int) -> Any:
    feeds = {TOKENS: tokens[None], LENGTHS: np.array([length]), **all_sure(engine.spec, 1, len(tokens))}
    return engine.run(feeds)[LOGITS][0]


def distances(engines: list[Any], texts: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the rows of `compare` for each text."""
    for text in texts:
        rows = []
        for at in range(0, len(text) - 1, CHUNK):
            part = text[at : min(at + CHUNK, len(text) - 1)]
            floats, levels = (np.array(step(engine, part, at)) for engine in engines)
            rows.append(compare(floats, levels, text[at + 1 : at + 1 + len(part)]))
        yield np.concatenate(rows)


def step_ms(engines: list[Any], tokens: np.ndarray, context: int, seconds: float) -> Iterator[tuple[int, list[float]]]:
    """Yields for numbers of nodes the median of a step after `context` rows, by engine."""
    for engine in engines:
        for at in range(0, context, CHUNK):
            step(engine, tokens[at : min(at + CHUNK, context)], at)
    for nodes in NODES:
        taken: list[list[float]] = [[] for _ in engines]
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for engine, times in zip(engines, taken, strict=True):
                start = time.perf_counter()
                step(engine, tokens[context : context + nodes], context)
                times.append(1e3 * (time.perf_counter() - start))
        yield nodes, [statistics.median(times) for times in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs=2)
    parser.add_argument("--text", nargs="*", default=sorted(map(str, PAGES.glob("*.md"))))
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--max-windows", type=int, default=8)
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--only", choices=("distance", "time"))
    arguments = parser.parse_args()
    held = [load(bundle, threads=arguments.threads) for bundle in arguments.bundles]
    engines = [one.verifier.engine for one in held]
    text = "\n\n".join(Path(file).read_text(encoding="utf-8") for file in arguments.text)
    tokens = np.array(held[0].encode(text), np.int64)
    for bundle, engine in zip(arguments.bundles, engines, strict=True):
        row = sum(heads * width * np.dtype(dtype).itemsize for heads, width, dtype in engine.caches.sizes.values())
        print(f"{bundle}: {row} bytes a token and slot")
    if arguments.only != "time":
        size = arguments.window
        texts = [tokens[at : at + size] for at in range(0, len(tokens) - 1, size)][: arguments.max_windows]
        found = distance_from_rows(list(distances(engines, texts)))
        print(f"{found.num_positions} positions in {len(texts)} windows of {size}: {found.summary()}")
        print(f"  perplexity change {found.perplexity_change:+.5f}, standard error {found.perplexity_error:.5f}")
    if arguments.only != "distance":
        long = np.resize(tokens, arguments.context + max(NODES))
        for nodes, (floats, levels) in step_ms(engines, long, arguments.context, arguments.seconds):
            print(f"context {arguments.context}, {nodes} nodes: {floats:.2f} ms float, {levels:.2f} ms int8")


if __name__ == "__main__":
    main()
