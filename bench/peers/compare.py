#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare bundles of one model with the peers, and keep what was measured for the page.

    python bench/peers/compare.py bundles/smollm2 --model "SmolLM2-135M-Instruct, Q4_1" \
        --out bench/results/smollm2.json --categories all --limit 3 --threads 2

Each bundle is measured as `speccompile bench` does it, with the peers' processes taking turns, and compares what has
its precision. Without --out the table is printed only. `page.py` makes the table and the plot of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from bench.peers.peers import (
    ENVIRONMENTS,
    PEERS,
    PRECISIONS,
    comparison_rows,
    jobs_of_peers,
    precision_from_bundle,
    print_rows,
    read_peers,
)
from speccompile.benchmark.measure import Job, Settings, measure, read_methods
from speccompile.benchmark.tables import print_report
from speccompile.bundle.bundle import read_bundle
from speccompile.cli.bench import read_samples
from speccompile.cli.output import print_warning

Report = Mapping[str, Any]
FACTS = (
    *("cpu", "num_cores", "threads", "num_prompts", "max_new_tokens", "repeats", "versions"),
    *("load_average_before", "load_average_after"),
)


def compare(folder: Path, options: argparse.Namespace) -> Report:
    """Returns the report of one bundle with the rows of all engines, and prints it."""
    installed, left_out = read_peers(options.peers, options.peers_dir)
    bundle = read_bundle(folder)
    samples = read_samples(bundle, options.prompts, options.categories, options.limit)
    settings = Settings(
        modes=options.modes,
        also=read_methods(options.also),
        max_new_tokens=options.max_new_tokens,
        repeats=options.repeats,
        threads=options.threads,
        assistant_tokens=options.assistant_tokens,
    )

    def jobs(job: Job, reasons: dict[str, str]) -> list[Job]:
        reasons.update(left_out)
        return jobs_of_peers(bundle, installed, options.precisions, job, options.peers_dir / "models", reasons)

    report = measure(bundle, samples, (), settings, jobs, print_warning)
    precision, console = precision_from_bundle(bundle), Console()
    rows = comparison_rows(report["modes"], bundle.recipe.method, precision, installed)
    peers = {row["name"] for row in rows if row["engine"] in {peer.name for peer in installed}}
    own = {name: mode for name, mode in report["modes"].items() if name not in peers}
    print_report(console, {**report, "modes": own})
    print_rows(console, rows, installed, report["reference"].get("source"))
    versions = {peer.name: dict(peer.versions) for peer in installed}
    return {**report, "peers": {"rows": rows, "versions": versions, "left_out": report["left_out"]}}


def run_from_report(report: Report) -> dict[str, Any]:
    """Returns what the page needs of a report: machine, versions, and a row for each mode of each engine."""
    rows = []
    for row in report["peers"]["rows"]:
        facts = {name: value for name, value in row.items() if name != "tokens_per_s_all"}
        kinds = {kind: group["modes"][row["name"]] for kind, group in report["by_category"].items()}
        rows.append({**facts, "by_kind": {kind: mode["tokens_per_s"] for kind, mode in kinds.items()}})
    environment, peers = report["environment"], report["peers"]
    return {
        "environment": {name: environment[name] for name in FACTS},
        "versions": peers["versions"],
        "left_out": peers["left_out"],
        "warnings": report["warnings"],
        "rows": rows,
    }


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE", help="of one model, one for each precision")
    parser.add_argument("--model", default="", help="what was measured, in words: a quantised file says so")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--peers", default="all", help=f"some of {','.join(PEERS)}")
    parser.add_argument("--precisions", help=f"of the peers: {','.join(PRECISIONS)}; the bundle's own by default")
    parser.add_argument("--peers-dir", type=Path, default=ENVIRONMENTS, help="where `make peers` made them")
    parser.add_argument("--prompts", type=Path, help="a file instead of the categories")
    parser.add_argument("--categories", default="all")
    parser.add_argument("--limit", type=int, help="most prompts, of each category")
    parser.add_argument("--modes", default="all", help="our own, see `speccompile bench`")
    parser.add_argument("--also", help="more methods of ours, a process each")
    for name, default in (("max-new-tokens", 128), ("repeats", 5), ("threads", None), ("assistant-tokens", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    if options.out is not None and not options.model:
        parser.error("--out needs --model")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every bundle and write one file."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = read_options(given)
    runs = [run_from_report(compare(bundle, options)) for bundle in options.bundles]
    if options.out is None:
        return
    date, command = datetime.date.today().isoformat(), f"compare.py {' '.join(given)}"
    result = {"model": options.model, "date": date, "command": command, "runs": runs}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
