#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the scheduler costs over the plain loop, and what kept caches save in chats.

    python bench/scheduler.py BUNDLE [--prompts examples/prompts.jsonl] [--rounds 5] [--json OUT]

Overhead: the same greedy prompts at batch 1 and at the bundle's batch size, by the offline loop and by the scheduler
without a controller, in interleaved rounds. Compared is the time of a step outside of the engines, as engines take
the same in both and most of it. Chats: several chats of several turns, each turn's prompt being all that was said
before and a new request, with and without kept caches.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from speccompile.core.sampling import SamplingParams
from speccompile.runtime.engine import load
from speccompile.runtime.handles import RequestHandle
from speccompile.runtime.requests import Request
from speccompile.runtime.scheduler import Scheduler
from speccompile.runtime.service import make_scheduler, open_outputs
from speccompile.runtime.spec_engine import SpecEngine

NEXT = "\n\n\ndef next_step(values):\n    "  # what every turn of a chat asks for


def submit(engine: SpecEngine, scheduler: Scheduler, prompt: list[int], params: SamplingParams) -> RequestHandle:
    """Submits a prompt."""
    handle = RequestHandle([Request(prompt, params)], scheduler.counters.num_requests, perf_counter())
    open_outputs(handle, engine, "auto")
    scheduler.add(handle)
    return handle


def offline(engine: SpecEngine, prompts: list[list[int]], params: SamplingParams) -> tuple[float, float, Any]:
    """Returns (ms outside of the engines, ms in them) per step, and the texts."""
    generations = engine.generate(prompts, params, batch_size=len(prompts))
    # All take part in the longest one's steps, but for those that end before.
    longest = max((g.stats for g in generations), key=lambda stats: int(stats["num_steps"]))
    steps = longest["num_steps"]
    return longest["outside_engine_ms"] / steps, longest["engine_ms"] / steps, [g.tokens for g in generations]


def scheduled(engine: SpecEngine, prompts: list[list[int]], params: SamplingParams) -> tuple[float, float, Any]:
    """Returns the same by the scheduler, once all prompts are read."""
    scheduler, spent, steps = make_scheduler(engine, keep_prefixes=False), [0.0, 0.0], 0
    sequences = [submit(engine, scheduler, prompt, params).open[0] for prompt in prompts]
    while scheduler.has_work:
        is_full = len(scheduler.allocator.active) == len(prompts)
        start_s, engine_s = perf_counter(), sum(e.seconds for e in engine.engines)
        scheduler.step()
        if is_full:
            engine_s = sum(e.seconds for e in engine.engines) - engine_s
            spent[0] += perf_counter() - start_s - engine_s
            spent[1] += engine_s
            steps += 1
    return (
        spent[0] * 1e3 / steps,
        spent[1] * 1e3 / steps,
        [sequence.tokens[sequence.num_prompt :] for sequence in sequences],
    )


def measure_overhead(engine: SpecEngine, prompts: list[list[int]], rounds: int) -> dict[str, Any]:
    """Returns the medians over rounds, at one batch size."""
    params = SamplingParams(max_new_tokens=96, ignore_eos=True)
    rows = []
    for _ in range(rounds):
        plain, served = offline(engine, prompts, params), scheduled(engine, prompts, params)
        assert plain[2] == served[2], "texts differ"
        rows.append((plain[0], plain[1], served[0], served[1]))
    outside, inside, served_outside, served_inside = (median(column) for column in zip(*rows, strict=True))
    return {
        "batch": len(prompts),
        "loop_outside_ms": outside,
        "loop_engine_ms": inside,
        "scheduler_outside_ms": served_outside,
        "scheduler_engine_ms": served_inside,
        "overhead": (served_outside - outside) / (outside + inside),
    }


def measure_chats(engine: SpecEngine, prompts: list[str], keeps: bool, turns: int) -> dict[str, Any]:
    """Runs chats side by side, turn by turn; returns what was read and how long it took."""
    scheduler, params = make_scheduler(engine, keep_prefixes=keeps), SamplingParams(max_new_tokens=48, ignore_eos=True)
    said, first_ms, fresh = [engine.encode(prompt) for prompt in prompts], [], engine.encode(NEXT)
    for turn in range(turns):
        sequences = [submit(engine, scheduler, tokens, params).open[0] for tokens in said]
        while scheduler.has_work:
            stats = [step_output.stats for _, step_output in scheduler.step() if step_output.stats]
            first_ms += [s["time_to_first_token_ms"] for s in stats if turn]
        said = [[*sequence.tokens, *fresh] for sequence in sequences]
    counters = scheduler.json_from_scheduler()
    return {
        "said": said,
        "num_prompts": counters["num_prompts"],
        "hit_rate": counters["num_prefix_hits"] / counters["num_prompts"],
        "hit_rate_of_later_turns": counters["num_prefix_hits"] / (counters["num_prompts"] - len(prompts)),
        "num_prompt_tokens": counters["num_prompt_tokens"],
        "num_prefill_tokens": counters["num_prefill_tokens"],
        "num_reused_tokens": counters["num_reused_tokens"],
        "later_turns_first_token_ms": median(first_ms),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parents[1] / "examples/prompts.jsonl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = load(args.bundle, threads=args.threads)
    texts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]
    tokens = [engine.encode(text) for text in texts]
    most = engine.context.max_slots
    overheads = [measure_overhead(engine, (tokens * most)[:batch], args.rounds) for batch in sorted({1, most})]
    chats = {}
    for keeps in (False, True, False, True):
        chats[keeps] = measure_chats(engine, texts[: max(most - 2, 1)], keeps, args.turns)
    assert chats[True].pop("said") == chats[False].pop("said"), "texts differ"
    for row in overheads:
        print(
            f"batch {row['batch']}: outside of engines {row['loop_outside_ms']:.3f} ms a step in the loop, "
            f"{row['scheduler_outside_ms']:.3f} ms in the scheduler; engines {row['loop_engine_ms']:.2f} ms; "
            f"overhead {row['overhead']:.2%}"
        )
    for keeps, row in chats.items():
        print(f"{'kept caches' if keeps else 'no kept caches'}: {json.dumps(row)}")
    if args.json:
        record = {"overheads": overheads, "chats": {"kept": chats[True], "anew": chats[False]}}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
