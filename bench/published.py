# SPDX-License-Identifier: Apache-2.0
"""Published speed-ups of speculative decoding on GPUs beside the planner's predictions: a table of hits and misses.

    python bench/published.py [--json FILE]

The figures and their sources are in published.toml. A prediction has the sizes of target and drafter, the machine's
published rates and the tokens a step of the source; the range is over the machine's efficiency, and over acceptance
where the source has no lengths. A hit is a middle within 25 % of the published figure. No constant is fitted.
"""

import argparse
import json
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from speccompile.core.jobs import WeightCounts
from speccompile.planner.acceptance import published
from speccompile.planner.costs import LOOP_S, GraphCosts
from speccompile.planner.machine import BITS, Machine, find_machine

FIGURES = Path(__file__).with_name("published.toml")
CONTEXT = 512
TOLERANCE = 0.25
DRAFT_VOCAB = 32_000  # of published EAGLE-3 drafters
MEDUSA_HEADS = 5
DFLASH_LAYERS = 5


@dataclass(frozen=True)
class Result:
    """A published speed-up and what the planner says."""

    source: str
    machine: str
    model: str
    method: str
    batch: int
    published: float
    low: float
    high: float
    reason: str

    @property
    def predicted(self) -> float:
        return fmean((self.low, self.high))

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def is_hit(self) -> bool:
        return abs(self.error) <= TOLERANCE


def costs_of(sizes: dict[str, int], precision: str, layers: int, vocab: int, more: int = 0) -> GraphCosts:
    """Returns the costs of a decoder's graph with these layers and head, and `more` weights in linears."""
    hidden, kv = sizes["hidden"], sizes["kv_heads"] * sizes["head_dim"]
    attention = 2 * hidden * sizes["heads"] * sizes["head_dim"] + 2 * hidden * kv
    num = layers * (attention + 3 * hidden * sizes["ffn"]) + vocab * hidden + more
    counts = WeightCounts(num, num, 0)
    group = sizes["heads"] // sizes["kv_heads"]
    return GraphCosts("", precision, counts, 0, 1, 2 * kv * layers, group, layers, vocab, 0, 0, 0, 0)


def draft_costs(method: str, sizes: dict[str, int], precision: str) -> GraphCosts | None:
    hidden, vocab = sizes["hidden"], sizes["vocab"]
    wider = hidden * (sizes["heads"] + 2 * sizes["kv_heads"]) * sizes["head_dim"]  # EAGLE-3 reads states and embeddings
    layers, head, more = {
        "eagle": (1, vocab, 2 * hidden**2),
        "eagle2": (1, vocab, 2 * hidden**2),
        "eagle3": (1, DRAFT_VOCAB, wider),
        "medusa": (0, MEDUSA_HEADS * vocab, MEDUSA_HEADS * hidden**2),
        "dflash": (DFLASH_LAYERS, vocab, DFLASH_LAYERS * hidden**2),
        "ngram": (0, 0, 0),
    }[method]
    return costs_of(sizes, precision, layers, head, more) if head else None


def machine_of(row: dict[str, Any]) -> Machine:
    """Returns the machine, without the rates of precisions in which the row's weights are not multiplied."""
    machine, products = find_machine(row["machine"]), BITS[row.get("products", "int4")]
    return replace(machine, rates={name: rate for name, rate in machine.rates.items() if BITS[name] >= products})


def result_of(row: dict[str, Any], models: dict[str, dict[str, int]]) -> Result:
    sizes, batch = models[row["model"]], row["batch"]
    target = costs_of(sizes, row["precision"], sizes["layers"], sizes["vocab"])
    draft = draft_costs(row["method"], sizes, row["precision"])
    if "tokens" in row:
        lengths = (row["tokens"],) * 2
    else:
        known = published(row["method"], None, None)
        assert known is not None
        lengths = known.lengths(row["runs"])
    machine, found = machine_of(row), []
    for end in (machine.at(0), machine.at(1)):
        plain_s = target.step_s(end, 1, batch, CONTEXT) + LOOP_S * end.host
        step_s = target.step_s(end, row["nodes"], batch, CONTEXT) + LOOP_S * end.host
        if draft is not None:
            step_s += row["runs"] * draft.step_s(end, row["run_nodes"], batch, CONTEXT)
        found += [length * plain_s / step_s for length in lengths]
    speedup = row.get("speedup") or row["fast"] / row["plain"]
    names = (row[key] for key in ("source", "machine", "model", "method", "batch"))
    return Result(*names, round(speedup, 2), min(found), max(found), row["reason"])


def results() -> list[Result]:
    data = tomllib.loads(FIGURES.read_text(encoding="utf-8"))
    return [result_of(row, data["models"]) for row in data["figures"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = results()
    print("| source | GPU | model | method | batch | published | predicted | error | |\n" + "|---" * 9 + "|")
    for one in found:
        span = f"{one.predicted:.2f} ({one.low:.2f}-{one.high:.2f})"
        end = "" if one.is_hit else f"miss: {one.reason}"
        cells = (one.source, one.machine, one.model, one.method, one.batch, f"{one.published:.2f}", span)
        print(f"| {' | '.join(map(str, cells))} | {one.error:+.0%} | {end} |")
    errors = [abs(one.error) for one in found]
    print(
        f"{sum(one.is_hit for one in found)} of {len(found)} within {TOLERANCE:.0%}; median error {median(errors):.0%}"
    )
    if args.json is not None:
        args.json.write_text(json.dumps([{**asdict(one), "error": one.error} for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
