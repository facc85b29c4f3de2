# SPDX-License-Identifier: Apache-2.0
"""Tokens per second by batch size: plain decoding, chains of fixed lengths, and the controller, all by the scheduler.

    python bench/controller.py BUNDLE --prompts PROMPTS.jsonl [--batches 1,2,4,8,16,32,64] [--fixed 2,4] [--json OUT]

All ways use one engine, in turn and in another order each round, so that neither the placement of memory nor a load on
the machine favours one of them. A round is the same work for all: from when all slots decode until a number of requests
have ended (at least as many as the batch has slots), each slot taking the next prompt as soon as it is free, prompts
included. Speeds are medians over the rounds. `ratio` is the median over the rounds of controller / best of the others
(the one whose own speed is best), `error` its standard error by the bootstrap. After 16 rounds only these two go on,
for a smaller error in the same time; where they go on for at least as many rounds, the ratio is that of these rounds
alone: the ones that chose the best favour it. The controller is one object for all batch sizes, as in a server, and has
`--warm-up` seconds at each batch size before the first round.
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
from speccompile.runtime.handles import RequestHandle
from speccompile.runtime.requests import Request
from speccompile.runtime.service import make_scheduler, open_outputs
from speccompile.runtime.spec_engine import SpecEngine

LEAST_ROUNDS = 16  # however long they last


def _learn_nothing(num_slots: int, num_nodes: int, times: StepTimes) -> None:
    """Replaces a proposer's `observe`: learns nothing."""


class Way:
    """A planner, with its turns on an engine that others use as well.

    Args:
        engine: the engine.
        planner: how far to draft.
        requests: prompts with their sampling, taken in turn.
    """

    def __init__(self, engine: SpecEngine, planner: Planner, requests: Sequence[Request]) -> None:
        self.engine, self.planner, self.requests = engine, planner, requests
        self.speeds: list[float] = []
        self._num_handles = 0

        self._observe = engine.proposer.observe

    def begin(self, batch: int) -> None:
        """Resets the engine, and fills all slots."""
        self.batch = batch
        # The method's costs are learnt from the controller's own steps alone.
        learns = isinstance(self.planner, Controller)
        self.engine.proposer.observe = self._observe if learns else _learn_nothing
        self.scheduler = make_scheduler(self.engine, self.planner, prefill_chunk=512, keep_prefixes=False)
        while len(self.scheduler.allocator.active) < batch:
            self._step()

    def _step(self) -> tuple[int, int]:
        """Runs one step; returns its tokens, and the number of requests that ended."""
        scheduler = self.scheduler
        while len(scheduler.queue) + len(scheduler.allocator.active) + bool(scheduler.allocator.reading) < self.batch:
            request = self.requests[self._num_handles % len(self.requests)]
            handle = RequestHandle([request], self._num_handles, perf_counter())
            open_outputs(handle, self.engine, "auto")
            scheduler.add(handle)
            self._num_handles += 1
        step_outputs = [step_output for _, step_output in scheduler.step()]
        return sum(len(step_output.tokens) for step_output in step_outputs), sum(
            step_output.finish_reason is not None for step_output in step_outputs
        )

    def warm_up(self, seconds: float) -> float:
        """Decodes for a while; returns the requests that ended per second."""
        start_s, num_ended = perf_counter(), 0
        while (spent_s := perf_counter() - start_s) < seconds:
            num_ended += self._step()[1]
        self.scheduler.cancel_all()
        return num_ended / spent_s

    def measure(self, first: int, num_requests: int) -> None:
        """Measures one round: from request `first` on, until so many have ended."""
        self._num_handles = first
        self.begin(self.batch)
        num_tokens, num_ended, start_s = 0, 0, perf_counter()
        while num_ended < num_requests:
            tokens, ended = self._step()
            num_tokens += tokens
            num_ended += ended
        self.speeds.append(num_tokens / (perf_counter() - start_s))
        self.scheduler.cancel_all()


def make_ways(args: argparse.Namespace) -> dict[str, Way]:
    """Returns all ways, on one engine."""
    lines = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    rng = random.Random(args.seed)
    rng.shuffle(lines)
    requests = []
    for number, line in enumerate(lines):
        # Lengths differ, so that sequences end one by one.
        most = rng.randrange(args.new_tokens // 2, 3 * args.new_tokens // 2)
        params = SamplingParams(max_new_tokens=most, temperature=args.temperature, seed=number, ignore_eos=True)
        requests.append(Request(line["prompt"], params))

    engine = speccompile.load(args.bundle, verify=False, allow_synthetic_acceptance=True)
    planners: dict[str, Planner] = {"plain": FixedLength(0)}
    planners |= {f"fixed {length}": FixedLength(length) for length in args.fixed}
    planners["controller"] = controller_of(engine.proposer)
    return {name: Way(engine, planner, requests) for name, planner in planners.items()}


def measure(ways: dict[str, Way], batch: int, args: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Returns a row of the table."""
    for name, way in ways.items():
        way.speeds = []
        way.begin(batch)
        rate = way.warm_up(args.warm_up if name == "controller" else 1.0)
    each, first, end_s = max(batch, round(rate * args.seconds)), 0, perf_counter() + args.most_seconds
    running = list(ways.values())
    for number in range(args.rounds):
        if number == LEAST_ROUNDS:
            running = [ways["controller"], ways[best_of_others(ways)]]
        if number >= LEAST_ROUNDS and perf_counter() > end_s:
            break
        for way in rng.sample(running, len(running)):
            way.measure(first, each)
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
    return {"batch": batch, "speeds": speeds, "ratio": ratio, "error": error, "windows": windows, "held": held}


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
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    rng, ways, rows = random.Random(args.seed), make_ways(args), []
    print("batch " + "".join(f"{name:>12}" for name in ways) + "   ratio  error  rounds  in use", flush=True)
    for batch in args.batches:
        row = measure(ways, batch, args, rng)
        rows.append(row)
        shown = "".join(f"{row['speeds'][name]:12.1f}" for name in ways)
        num_rounds, in_use = len(row["windows"]["controller"]), "drafts" if row["held"]["drafts"] else "plain"
        print(f"{batch:5} {shown}   {row['ratio']:5.3f}  {row['error']:5.3f}  {num_rounds:6}  {in_use}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
