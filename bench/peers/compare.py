#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare bundles of one model with the peers, and keep what was measured for the page.

A run of `speccompile bench BUNDLE --peers ...` for each bundle, so each compares what has the bundle's precision:

    python bench/peers/compare.py bundles/smollm2 --model "SmolLM2-135M-Instruct, Q4_1" \
        --out bench/results/smollm2.json -- --categories all --limit 3 --repeats 5 --threads 2

What stands after `--` is given to every run. `page.py` makes the table and the plot of docs/benchmarks.md of it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]
FACTS = (
    *("cpu", "num_cores", "threads", "num_prompts", "max_new_tokens", "repeats", "versions"),
    *("load_average_before", "load_average_after"),
)


def measure(bundle: str, peers: str, options: Sequence[str]) -> Report:
    """Returns the report of one run.

    Raises:
        SystemExit: the run failed; it has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "speccompile", "bench", bundle, "--peers", peers, "--json", str(file)]
        code = subprocess.run([*command, *options], check=False).returncode
        if code:
            raise SystemExit(code)
        report: Report = json.loads(file.read_text(encoding="utf-8"))
        return report


def run_from_report(report: Report) -> dict[str, Any]:
    """Returns what the page needs of a report: machine, versions, and a row for each mode of each engine."""
    rows = []
    for row in report["peers"]["rows"]:
        told = {name: value for name, value in row.items() if name != "tokens_per_s_all"}
        kinds = {kind: group["modes"][row["name"]] for kind, group in report["by_category"].items()}
        rows.append({**told, "by_kind": {kind: mode["tokens_per_s"] for kind, mode in kinds.items()}})
    environment, peers = report["environment"], report["peers"]
    return {
        "environment": {name: environment[name] for name in FACTS},
        "versions": peers["versions"],
        "left_out": peers["left_out"],
        "warnings": report["warnings"],
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every bundle and write one file."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="bundles of one model, one for each precision")
    parser.add_argument("--model", required=True, help="what was measured, in words: a quantised file says so")
    parser.add_argument("--peers", default="all")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    options = parser.parse_args(given[:split])
    runs = [run_from_report(measure(bundle, options.peers, given[split + 1 :])) for bundle in options.bundles]
    date, command = datetime.date.today().isoformat(), f"compare.py {' '.join(given)}"
    result = {"model": options.model, "date": date, "command": command, "runs": runs}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
