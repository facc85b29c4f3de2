# SPDX-License-Identifier: Apache-2.0
"""Check and measure everything that needs a CUDA GPU, and write docs/gpu.md.

    python bench/gpu_check/main.py [--sections kernels,ort-cuda,tensorrt] [--work DIR] [--page docs/gpu.md]

Every section runs in a process of its own, with a time limit and a log. One that cannot run here says why.

Needs: pip install cuda-python onnxruntime-gpu, torch and transformers to build and as the reference, tensorrt or
tensorrt-rtx for TensorRT. Exit code: 0 when nothing failed, 1 when something did, 2 without a CUDA device (nothing
is written then), 3 when a section that was asked for by name could not run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.gpu_check import report  # noqa: E402

SECTIONS = {"kernels": 1200, "ort-cuda": 1800, "tensorrt": 3000}  # seconds at most
PACKAGES = (
    "numpy",
    "cuda-python",
    "cuda-bindings",
    "onnxruntime-gpu",
    "onnxruntime",
    "tensorrt",
    "tensorrt-rtx",
    "torch",
    "transformers",
)


def run_child(section: str, work: Path, limit_s: float) -> dict[str, Any]:
    """Runs one section; returns a result however its process ends."""
    log, answer = work / "logs" / f"{section}.log", work / f"{section}.json"
    log.parent.mkdir(parents=True, exist_ok=True)
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.gpu_check.child", section, str(work), str(answer)]
    with log.open("w", encoding="utf-8") as handle:
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=handle, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            )
            ending = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            ending = f"no end after {limit_s:.0f} s"
    if answer.exists():
        return report.completed(json.loads(answer.read_text(encoding="utf-8")))
    tail = " ".join(log.read_text(encoding="utf-8", errors="replace").split()[-40:])
    return {"status": report.FAILED, "reason": f"{ending}, see {log.name}: {tail}", "rows": []}


def facts_of(machine: dict[str, Any]) -> dict[str, str]:
    """Hardware, versions, date."""
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    major, minor = machine["compute_capability"]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "GPU": f"{machine['name']}, sm_{major}{minor}, {machine['total_bytes'] / 2**30:.0f} GiB",
        "CUDA": f"driver {machine['driver']}, runtime {machine['runtime']}",
        "software": f"Python {platform.python_version()}, {', '.join(versions)}",
    }


def section_names(text: str) -> list[str]:
    """Returns the names of a comma-separated list."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"got {name!r}; expected some of {', '.join(SECTIONS)}")
    return names


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = "these alone, and they must run: some of " + ", ".join(SECTIONS)
    parser.add_argument("--sections", nargs="+", type=section_names, metavar="NAME", help=asked)
    parser.add_argument("--work", type=Path, default=ROOT / "build/gpu-check", help="bundles, logs, results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/gpu.md")
    args = parser.parse_args(arguments)
    work = args.work.absolute()

    machine = run_child("machine", work, 120)
    if machine["status"] != report.PASSED:
        print(f"gpu-check: no CUDA device can be used here: {machine['reason']}", file=sys.stderr)
        print("Nothing was measured and nothing was written.", file=sys.stderr)
        return 2
    results = {}
    for name in itertools.chain(*args.sections) if args.sections else SECTIONS:
        print(f"gpu-check: {name} ...", flush=True)
        results[name] = held = run_child(name, work, SECTIONS[name])
        print(f"gpu-check: {name}: {held['status']} {held['reason']}", flush=True)
        for r in held["rows"]:
            print(f"  {r['what']}: {r['got']}" + (f" (expected {r['expected']})" if r["expected"] else ""))
        report.write_page(args.page, facts_of(machine["machine"]), results)  # after each: a later crash loses nothing
    statuses = [r["status"] for r in results.values()]
    print(f"gpu-check: logs in {work / 'logs'}, table in {args.page}")
    if report.FAILED in statuses:
        return 1
    return 3 if args.sections and report.NOT_RUN in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
