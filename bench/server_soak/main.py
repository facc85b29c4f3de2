#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Load `speccompile serve` for minutes, and compare every answer with the offline engine's.

    python bench/server_soak/main.py BUNDLE [--clients 64] [--seconds 180] [--json OUT]

Two phases of `--seconds` each: greedy requests, whole and streamed; then the same with 20 % abandoned and 5 % malformed
ones. Afterwards nothing may be left in the server, its memory must not have grown, and SIGTERM must end it with 0.
Exit code: 0 when all of it holds, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.server_soak.load import Load, Server, Task, run_load  # noqa: E402
from bench.server_soak.serve import ServeProcess  # noqa: E402
from speccompile.core.sampling import SamplingParams  # noqa: E402
from speccompile.runtime.engine import load as load_bundle  # noqa: E402

LENGTHS = (16, 48)  # new tokens
MAX_GROWTH = 0.05  # of memory, from the second quarter of a phase to its last


def make_tasks(bundle: Path, prompts: Path) -> list[Task]:
    """Returns every prompt with every length, and the text that plain greedy decoding gives."""
    engine = load_bundle(bundle)
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    tasks = []
    for length in LENGTHS:
        answers = engine.generate(texts, SamplingParams(max_new_tokens=length), speculative=False)
        tasks += [Task(text, length, answer.text) for text, answer in zip(texts, answers, strict=True)]
    return tasks


def wait_empty(server: Server, limit_s: float = 30.0) -> dict[str, float]:
    """Returns the server's counts once nothing runs in it; as they are when that takes too long."""
    end_s = time.monotonic() + limit_s
    while True:
        counts = server.counts()
        if not any(counts[name] for name in ("active", "queued", "prefilling")) or time.monotonic() > end_s:
            return counts
        time.sleep(0.2)


def faults_from_phase(report: dict[str, Any], counts: dict[str, float]) -> list[str]:
    """Returns what is wrong in a phase."""
    faults = list(report["faults"])
    if report["ends"].get("right", 0) == 0:
        faults.append("no answer came")
    left = {name: counts[name] for name in ("active", "queued", "prefilling") if counts[name]}
    if left:
        faults.append(f"left in the server: {left}")
    if counts["taken"] != counts["finished"]:
        faults.append(f"{counts['taken']:.0f} requests were taken, {counts['finished']:.0f} ended")
    _, second, _, last = report["resident_mib"]
    if last > second * (1 + MAX_GROWTH):
        faults.append(f"memory grew from {second} to {last} MiB")
    return faults


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, default=ROOT / "examples/prompts.jsonl")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--log", type=Path, default=Path("soak.log"), help="file for what the server prints")
    parser.add_argument("--json", type=Path, help="write the report here")
    args = parser.parse_args()
    tasks = make_tasks(args.bundle, args.prompts)
    server = ServeProcess(args.bundle, args.log)
    phases = {
        "answers": Load(args.clients, args.seconds),
        "cancels": Load(args.clients, args.seconds, cancels=0.2, malformed=0.05, seed=1),
    }
    result: dict[str, Any] = {"server": server.name, "clients": args.clients, "lengths": LENGTHS}
    faults: list[str] = []
    try:
        for name, load in phases.items():
            report = asyncio.run(run_load(server, tasks, load)).json_from_report()
            counts = wait_empty(server)
            result[name] = {**report, "server": counts}
            print(name, json.dumps(result[name], indent=1), flush=True)
            faults += [f"{name}: {fault}" for fault in faults_from_phase(report, counts)]
    finally:
        result["exit_code"] = server.stop()
    faults += [] if result["exit_code"] == 0 else [f"exit code {result['exit_code']}"]
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(faults) or "nothing lost, nothing mixed, nothing left")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
