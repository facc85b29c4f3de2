#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Thousands of random requests against a service: whole, abandoned, late and wrong ones; nothing may be mixed or leak.

    python bench/soak.py BUNDLE [--requests 10000] [--clients 24] [--prompts examples/prompts.jsonl]

Every greedy text is compared with the offline engine's plain one. Prompts are repeated and grow, so kept caches are
used, copied, exchanged and dropped all the time. Prints what became of the requests, and the memory of the process
after each tenth of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from time import perf_counter

import speccompile
from speccompile.backends.memory import read_memory
from speccompile.core.sampling import SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.requests import Request
from speccompile.runtime.service import Service, ServiceOptions

MOST = 24  # new tokens


async def ask(service: Service, rng: random.Random, prompt: list[int], text: list[int]) -> str:
    """Sends one request of a random kind; returns what became of it."""
    kind = rng.choices(("whole", "abandoned", "late", "wrong"), (70, 20, 5, 5))[0]
    known = rng.randint(0, len(text) - 1) if rng.random() < 0.5 else 0  # a later turn of the same chat
    params = SamplingParams(max_new_tokens=rng.randint(1, len(text) - known), ignore_eos=True)
    wanted = text[known : known + params.max_new_tokens]
    tokens = [10**9] if kind == "wrong" else [*prompt, *text[:known]]
    request = Request(tokens, params, timeout_s=rng.uniform(0.001, 0.2) if kind == "late" else None)
    got, reason, most = [], None, rng.randint(0, 3) if kind == "abandoned" else 10**9
    try:
        stream = service.stream(request)
    except RuntimeFault:
        assert kind == "wrong"
        return "refused"
    async with stream:
        async for _, step_output in stream:
            got += step_output.tokens
            reason = step_output.finish_reason
            most -= 1
            if most < 0:
                break
    assert got == wanted[: len(got)], f"mixed: {got} is not {wanted}"
    assert kind != "whole" or (got == wanted and reason == "length"), (kind, reason, got, wanted)
    return reason or "abandoned"


async def load_it(service: Service, args: argparse.Namespace, texts: list[tuple[list[int], list[int]]]) -> Counter[str]:
    """Sends all requests, `--clients` at a time; returns what became of them."""
    rng, ends, left = random.Random(args.seed), Counter[str](), args.requests

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            if left % max(args.requests // 10, 1) == 0:
                print(f"{left} left, {(read_memory('VmRSS') or 0) >> 20} MiB", flush=True)
            ends[await ask(service, rng, *rng.choice(texts))] += 1

    await asyncio.gather(*(client() for _ in range(args.clients)))
    return ends


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parents[1] / "examples/prompts.jsonl")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    engine = speccompile.load(args.bundle)
    prompts = [engine.encode(json.loads(line)["prompt"])[:48] for line in args.prompts.read_text().splitlines()]
    asked = SamplingParams(max_new_tokens=MOST, ignore_eos=True)
    texts = [(p, g.tokens) for p, g in zip(prompts, engine.generate(prompts, asked, speculative=False), strict=True)]
    service = Service(engine, ServiceOptions(prefill_chunk=48))
    service.start()
    start_s = perf_counter()
    ends = asyncio.run(load_it(service, args, texts))
    seconds = perf_counter() - start_s
    service.close(drain_s=30)
    stats = service.stats()
    print(f"{args.requests} requests in {seconds:.0f} s: {dict(ends)}")
    names = ("num_finished", "num_tokens", "mean_acceptance_length", "num_prefix_hits", "num_prompts")
    print({name: stats[name] for name in (*names, "num_reused_tokens", "num_prompt_tokens", "num_view_shrinks")})
    left = {name: stats[name] for name in ("num_queued", "num_prefilling", "num_active", "num_engine_faults", "fault")}
    print(left)
    assert not any(left.values()), "something is left"


if __name__ == "__main__":
    main()
