# SPDX-License-Identifier: Apache-2.0
"""Tokens per second by batch size: plain decoding, chains of fixed lengths, and the controller, all by the scheduler.

    python bench/controller.py BUNDLE --prompts PROMPTS.jsonl [--batches 1,2,4,8,16,32,64] [--fixed 2,4] [--json OUT]

Each way has an engine, the next one each round, so that the placement of memory favours none. In a round the ways take
turns step by step, each waiting until the others have as many tokens, so that a load on the machine hits all; only the
time of its own steps counts. A round is the same work for all: from when all slots decode until a number of requests
have ended (at least as many as the batch has slots), each slot taking the next prompt as soon as it is free, prompts
included. Speeds are medians over the rounds. `ratio` is the median over the rounds of controller / best of the others
(the one whose own speed is best), `error` its standard error by the bootstrap. After 16 rounds only these two go on,
for a smaller error in the same time; where they go on for at least as many rounds, the ratio is that of these rounds
alone: the ones that chose the best favour it. The controller is one object for all batch sizes, as in a server, and has
`--warm-up` seconds at each batch size before the first round; what its budget learns of costs stays with each engine.
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import speccompile
from speccompile.core.protocols import StepTimes
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.control import Controller, FixedLength, Planner, controller_of
from speccompile.runtime.requests import Request
from speccompile.runtime.sequences import RequestHandle
from speccompile.runtime.service import make_scheduler, open_outputs
from speccompile.runtime.spec_engine import SpecEngine

LEAST_ROUNDS = 16  # however long they last


def _learn_nothing(num_slots: int, num_nodes: int, times: StepTimes) -> None:
    """Replaces a proposer's `observe`: learns nothing."""


class Way:
    """A planner, with its requests and speeds.

    Args:
        planner: how far to draft.
        requests: prompts with their sampling, taken in turn.
    """

    def __init__(self, planner: Planner, requests: Sequence[Request]) -> None:
        self.planner, self.requests = planner, requests
        self.speeds: list[float] = []
        self.num_tokens, self.num_ended, self.spent_s = 0, 0, 0.0  # since all slots decode
        self.num_steps = self.num_drafting = 0  # of all rounds, with those that fill slots; those of them with drafts

    def begin(self, engine: SpecEngine, batch: int, first: int) -> None:
        """Resets an engine, and fills all its slots from request `first` on."""
        self.engine, self.batch, self._num_handles = engine, batch, first
        # The method's costs are learnt from the controller's own steps alone.
        vars(engine.proposer).pop("observe", None)
        if not isinstance(self.planner, Controller):
            engine.proposer.observe = _learn_nothing
        chunk = max(512, 8 * batch)  # enough for all slots to fill while the first ones end
        self.scheduler = make_scheduler(engine, self.planner, prefill_chunk=chunk, keep_prefixes=False)
        while len(self.scheduler.allocator.active) < batch:
            self.step()
        self.num_tokens, self.num_ended, self.spent_s = 0, 0, 0.0

    def step(self) -> None:
        """Runs one step, and counts its tokens, the requests that ended, and its seconds."""
        scheduler = self.scheduler
        while len(scheduler.queue) + len(scheduler.allocator.active) + bool(scheduler.allocator.reading) < self.batch:
            request = self.requests[self._num_handles % len(self.requests)]
            handle = RequestHandle(self._num_handles, perf_counter())
            open_outputs(handle, [request], self.engine, "auto")
            scheduler.add(handle)
            self._num_handles += 1
        start_s = perf_counter()
        step_outputs = [step_output for _, step_output in scheduler.step()]
        self.spent_s += perf_counter() - start_s
        self.num_steps += bool(step_outputs)
        self.num_drafting += any(step_output.num_draft_tokens for step_output in step_outputs)
        self.num_tokens += sum(len(step_output.tokens) for step_output in step_outputs)
        self.num_ended += sum(step_output.finish_reason is not None for step_output in step_outputs)

    def warm_up(self, engine: SpecEngine, batch: int, seconds: float) -> float:
        """Decodes for a while; returns the requests that ended per second."""
        self.begin(engine, batch, 0)
        while self.spent_s < seconds:
            self.step()
        self.scheduler.cancel_all()
        self.num_steps = self.num_drafting = 0
        return self.num_ended / self.spent_s


def run_round(ways: Sequence[Way], engines: Sequence[SpecEngine], batch: int, first: int, num_requests: int) -> None:
    """Measures one round of all ways: from request `first` on, until so many have ended."""
    for way, engine in zip(ways, engines, strict=True):
        way.begin(engine, batch, first)
    running = list(ways)
    while running:
        way = min(running, key=lambda way: way.num_tokens)
        way.step()
        if way.num_ended >= num_requests:
            running.remove(way)
    for way in ways:
        way.speeds.append(way.num_tokens / way.spent_s)
        way.scheduler.cancel_all()


def make_ways(args: argparse.Namespace) -> tuple[dict[str, Way], list[SpecEngine]]:
    """Returns all ways, and as many engines."""
    lines = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    rng = random.Random(args.seed)
    rng.shuffle(lines)
    requests = []
    for number, line in enumerate(lines):
        # Lengths differ, so that sequences end one by one.
        most = rng.randrange(args.new_tokens // 2, 3 * args.new_tokens // 2)
        params = SamplingParams(max_new_tokens=most, temperature=args.temperature, seed=number, ignore_eos=True)
        requests.append(Request(line["prompt"][-args.prompt_chars :], params))

    planners: dict[str, Planner] = {"plain": FixedLength(0)}
    planners |= {f"fixed {length}": FixedLength(length) for length in args.fixed}
    engines = [
        speccompile.load(args.bundle, verify=False, allow_synthetic_acceptance=True) for _ in range(len(planners) + 1)
    ]
    planners["controller"] = controller_of(engines[0].proposer)
    return {name: Way(planner, requests) for name, planner in planners.items()}, engines


def measure(
    ways: dict[str, Way], engines: list[SpecEngine], batch: int, args: argparse.Namespace, rng: random.Random
) -> dict[str, Any]:
    """Returns a row of the table."""
    for (name, way), engine in zip(ways.items(), engines, strict=True):
        way.speeds = []
        rate = way.warm_up(engine, batch, args.warm_up if name == "controller" else 1.0)
    each, first, end_s = max(batch, round(rate * args.seconds)), 0, perf_counter() + args.most_seconds
    running = list(ways.values())
    for number in range(args.rounds):
        if number == LEAST_ROUNDS:
            running = [ways["controller"], ways[best_of_others(ways)]]
        if number >= LEAST_ROUNDS and perf_counter() > end_s:
            break
        placed = [engines[(index + number) % len(running)] for index in range(len(running))]
        order = 1 if number % 2 == 0 else -1  # what runs before a step leaves its own numbers in the caches
        run_round(running[::order], placed[::order], batch, first, each)
        first += each
    speeds = {name: statistics.median(way.speeds) for name, way in ways.items()}
    # Where two went on, the other one has the most rounds.
    best = max(ways.keys() - {"controller"}, key=lambda name: (len(ways[name].speeds), speeds[name]))
    ratios = [ours / theirs for ours, theirs in zip(ways["controller"].speeds, ways[best].speeds, strict=True)]
    if len(ratios) >= 2 * LEAST_ROUNDS:
        ratios = ratios[LEAST_ROUNDS:]
    resampled = [statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(1000)]
    decisions = ways["controller"].planner.decisions()
    held = next(row for size, row in decisions.items() if int(size.split(",")[0]) >= batch)
    windows = {name: way.speeds for name, way in ways.items()}
    ratio, error = statistics.median(ratios), statistics.stdev(resampled)
    drafting = {name: way.num_drafting / way.num_steps for name, way in ways.items()}
    found = {"ratio": ratio, "error": error, "drafting": drafting}  # share of steps with drafts
    return {"batch": batch, "speeds": speeds, **found, "windows": windows, "held": held}


def best_of_others(ways: dict[str, Way]) -> str:
    """Returns the name of the fastest way but the controller, by the median of its rounds."""
    return max(ways.keys() - {"controller"}, key=lambda name: statistics.median(ways[name].speeds))


def numbers_from_text(text: str) -> list[int]:
    """Returns the numbers of a comma-separated list."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="built with engine.max_batch_size of the largest batch")
    parser.add_argument("--prompts", type=Path, required=True, help="one JSON object with `prompt` a line")
    parser.add_argument("--batches", type=numbers_from_text, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--fixed", type=numbers_from_text, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round, at least, about")
    parser.add_argument("--most-seconds", type=float, default=math.inf, help="of a batch size, after 16 rounds")
    parser.add_argument("--warm-up", type=float, default=20.0)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--prompt-chars", type=int, default=0, help="of longer prompts the end; 0: whole prompts")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    rng, rows = random.Random(args.seed), []
    ways, engines = make_ways(args)
    print("batch " + "".join(f"{name:>12}" for name in ways) + "   ratio  error  rounds  in use", flush=True)
    for batch in args.batches:
        row = measure(ways, engines, batch, args, rng)
        rows.append(row)
        shown = "".join(f"{row['speeds'][name]:12.1f}" for name in ways)
        num_rounds, in_use = len(row["windows"]["controller"]), "drafts" if row["held"]["drafts"] else "plain"
        print(f"{batch:5} {shown}   {row['ratio']:5.3f}  {row['error']:5.3f}  {num_rounds:6}  {in_use}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
