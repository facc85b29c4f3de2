# SPDX-License-Identifier: Apache-2.0
"""Check and measure everything that needs a CUDA GPU, and write one archive to send back.

    make gpu-env            # once: .venv-gpu with all packages
    make gpu-check          # python bench/gpu_check/main.py [--sections kernels,ort-cuda,...] [--quick] [--work DIR]

Every section runs in a process of its own, with a time limit and a log. One that cannot run here says why. WORK
(build/gpu-check) gets bundles, logs, report.md, report.json and gpu-check-DATE.tar.gz; no tracked file changes.

Exit code: 0 when nothing failed, 1 when something did, 2 without a CUDA device or the packages that all sections need
(nothing is measured then), 3 when a section that was asked for by name could not run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import platform
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.gpu_check import report  # noqa: E402

PARTS = ("tokens", "speed", "hybrid", "server", "wide")  # methods of parts.Subject

BACKENDS = {"ort-cuda": 1200, "tensorrt": 1800, "tensorrt-rtx": 1800}  # seconds of a part at most
NEEDED = {"numpy": "numpy", "cuda.bindings.runtime": "cuda-python", "pydantic": "pydantic", "tokenizers": "tokenizers"}
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


SECTIONS = {"kernels": 1200, **{f"{name}.{part}": limit for name, limit in BACKENDS.items() for part in PARTS}}


def run_child(section: str, work: Path, limit_s: float, *options: str) -> dict[str, Any]:
    """Runs one section; returns a result however its process ends."""
    log, answer = work / "logs" / f"{section}.log", work / f"{section}.json"
    log.parent.mkdir(parents=True, exist_ok=True)
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.gpu_check.child", section, str(work), str(answer), *options]
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


def missing_packages() -> list[str]:
    """Returns the packages without which no section can run."""
    missing = []
    for module, package in NEEDED.items():
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # a parent is missing
            found = False
        missing += [] if found else [package]
    return missing


def output_of(*command: str) -> str:
    """Returns what a command prints, or why it could not run."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as fault:
        return f"{command[0]}: {fault}\n"
    return done.stdout + done.stderr


def write_environment(work: Path) -> None:
    """Writes what the machine, the packages and the sources are: WORK/environment/*.txt."""
    folder = work / "environment"
    folder.mkdir(parents=True, exist_ok=True)
    for name, commands in {
        "nvidia-smi": [("nvidia-smi", "-q")],
        "packages": [(sys.executable, "-m", "pip", "freeze")],
        "commit": [("git", "rev-parse", "HEAD"), ("git", "status", "--porcelain")],
        "machine": [("uname", "-a"), ("lscpu",)],
    }.items():
        text = "".join(f"$ {' '.join(command)}\n{output_of(*command)}\n" for command in commands)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


def pack_archive(work: Path, stamp: str) -> Path:
    """Packs the report, logs, environment, and the manifests of the bundles that were built.

    Returns:
        The archive, gpu-check-STAMP.tar.gz in `work`.
    """
    kept = [*work.glob("report.*"), *work.glob("*.json"), *work.glob("logs/*"), *work.glob("environment/*")]
    kept += work.glob("bundles/*/manifest.json")
    dest = work / f"gpu-check-{stamp}.tar.gz"
    with tarfile.open(dest, "w:gz") as archive:
        for path in sorted(set(kept)):
            archive.add(path, f"gpu-check-{stamp}/{path.relative_to(work)}")
    return dest


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
    """Returns the names of a comma-separated list; a backend stands for all its parts."""
    names = []
    for name in filter(None, text.split(",")):
        found = [section for section in SECTIONS if name in (section, section.partition(".")[0])]
        if not found:
            raise argparse.ArgumentTypeError(f"got {name!r}; expected some of {_known()}")
        names += found
    return names


def _known() -> str:
    return f"kernels, {', '.join(BACKENDS)}, or a part: {', '.join(f'ort-cuda.{part}' for part in PARTS)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = "these alone, and they must run: some of " + _known()
    parser.add_argument("--sections", nargs="+", type=section_names, metavar="NAME", help=asked)
    parser.add_argument("--work", type=Path, default=ROOT / "build/gpu-check", help="bundles, logs, results")
    parser.add_argument("--quick", action="store_true", help="fewer prompts, rounds and seconds: some minutes")
    args = parser.parse_args(arguments)
    work = args.work.absolute()

    if missing := missing_packages():
        print(f"gpu-check: not installed in {sys.executable}: {', '.join(missing)}", file=sys.stderr)
        print("Run `make gpu-env` once, then `make gpu-check`. Nothing was measured.", file=sys.stderr)
        return 2
    machine = run_child("machine", work, 120)
    if machine["status"] != report.PASSED:
        print(f"gpu-check: no CUDA device can be used here: {machine['reason']}", file=sys.stderr)
        print("Nothing was measured.", file=sys.stderr)
        return 2
    facts, results = facts_of(machine["machine"]), {}
    write_environment(work)
    for name in itertools.chain(*args.sections) if args.sections else SECTIONS:
        print(f"gpu-check: {name} ...", flush=True)
        results[name] = held = run_child(name, work, SECTIONS[name], *(["--quick"] if args.quick else []))
        print(f"gpu-check: {name}: {held['status']} {held['reason']}", flush=True)
        for r in held["rows"]:
            print(f"  {r['what']}: {r['got']}" + (f" (expected {r['expected']})" if r["expected"] else ""))
        report.write_report(work, facts, results)  # after each: a later crash loses nothing
    statuses = [r["status"] for r in results.values()]
    archive = pack_archive(work, datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M%S"))
    print(f"gpu-check: report in {work / report.PAGE}; to send back: {archive}")
    if report.FAILED in statuses:
        return 1
    return 3 if args.sections and report.NOT_RUN in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
