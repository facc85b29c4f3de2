# SPDX-License-Identifier: Apache-2.0
"""Build every pair of target family and published speculator from its sizes alone, and write docs/reference/pairs.md.

    python bench/pairs/main.py [--only NAME,...] [--backends onnxruntime,tensorrt] [--retry | --again]
                               [--full | --narrow]

Weights are random. Each build is a `speccompile build` in a process of its own. What bench/pairs/pairs.json already
has is kept: `--retry` builds again what was not built, `--again` everything. TensorRT builds only what ONNX Runtime
built, with narrow layers; with `--narrow` ONNX Runtime's are narrow, too. `--full` keeps all tokens and experts, needs
a machine for them, and writes neither file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.pairs import page  # noqa: E402
from bench.pairs.rows import BY_NAME, PAIRS, Pair  # noqa: E402

RESULT, CHILD = (Path(__file__).with_name(name) for name in ("pairs.json", "child.py"))
ENGINE = {"max_batch_size": 2, "max_seq_len": 1024, "max_draft_nodes": 16}
BACKENDS = {
    "onnxruntime": {"backend": "onnxruntime", "threads": 1},
    "tensorrt": {"backend": "tensorrt", "variant": "tensorrt_rtx"},
}
NARROW = ("tensorrt",)  # the time of a plan's build is that of its kernels' choice, at any width
LIMIT_S = 1500.0  # of a build
LEAST_FREE_BYTES = 3 << 29  # of the machine's memory, which other work needs
POLL_S = 0.25
Record = dict[str, Any]


def free_bytes() -> int:
    """Returns the memory that processes can still take; only on Linux."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def write_inputs(pair: Pair, backend: str, folder: Path, *, is_full: bool, is_narrow: bool) -> Path:
    """Writes configs and recipe of a pair into a folder; returns the recipe."""
    for name, config in pair.configs(is_full=is_full, is_narrow=is_narrow).items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=1))
    recipe = folder / "recipe.yaml"  # JSON is YAML
    recipe.write_text(json.dumps({**pair.recipe(), "engine": {**BACKENDS[backend], **ENGINE}}, indent=1))
    return recipe


def build_pair(pair: Pair, backend: str, work: Path, *, is_full: bool = False, is_narrow: bool = False) -> Record:
    """Builds a pair in a process of its own, and removes the bundle.

    Args:
        pair: a row.
        backend: one of `BACKENDS`.
        work: a folder for configs, bundle and log; what it has of this build is replaced.
        is_full: with all tokens and experts.
        is_narrow: with narrow layers.

    Returns:
        {"outcome": "built" | "refused" | "fault" | "not run", "reason", "seconds", "peak_bytes", "bundle_bytes"}; the
        last three of a build.
    """
    folder = work.resolve() / f"{pair.name}-{backend}"
    shutil.rmtree(folder, ignore_errors=True)
    recipe = write_inputs(pair, backend, folder, is_full=is_full, is_narrow=is_narrow)
    command = [sys.executable, str(CHILD), "build", recipe.name, "-o", "bundle", "--no-cache", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # processes of the build import it too
    with (folder / "log").open("w") as log, (folder / "answer").open("w") as answer:
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=answer, stderr=log, start_new_session=True
        )
        stopped = _wait(child)
    shutil.rmtree(folder / "bundle", ignore_errors=True)
    if stopped:
        return {"outcome": "not run", "reason": stopped}
    texts = ((folder / name).read_text().replace(f"{folder}/", "") for name in ("answer", "log"))
    return record_of(child.returncode, *texts)


def _wait(child: subprocess.Popen[bytes]) -> str:
    """Waits for the end of a process; returns why it was ended here, or nothing."""
    waited, stopped = 0.0, ""
    while child.poll() is None:
        if waited > LIMIT_S:  # counted here, so that the time in which all of this is held up does not count
            stopped = f"no end within {LIMIT_S:.0f} s"
        elif free_bytes() < LEAST_FREE_BYTES:
            stopped = "this machine's memory"
        if stopped:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return stopped
        time.sleep(POLL_S)
        waited += POLL_S
    return ""


def record_of(code: int, answer: str, log: str) -> Record:
    """Returns the record of a build that ended.

    Args:
        code: of its exit.
        answer: what it printed, a JSON document of a build or an error.
        log: its messages.
    """
    if not answer.strip():
        last = (log.strip().splitlines() or [""])[-1]
        return {"outcome": "fault", "reason": f"exit code {code}: {last}"[:300]}
    held = json.loads(answer)
    if "error" in held:
        error = held["error"]
        reason = f"{error['where']}: got {error['got']}; expected {error['expected']}"
        return {"outcome": "refused", "reason": " ".join(reason.split())}
    sizes = {"peak_bytes": held["peak_rss_bytes"], "bundle_bytes": held["size_bytes"]}
    return {"outcome": "built", "reason": "", "seconds": round(held["seconds"]), **sizes}


def needs_build(held: Record | None, *, is_retry: bool, is_again: bool) -> bool:
    """Whether a pair is built again, by what is recorded of it."""
    return held is None or is_again or (is_retry and held["outcome"] != "built")


def read_result() -> dict[str, dict[str, Record]]:
    """Returns the records by pair and backend, in the order of the rows."""
    held = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    return {pair.name: held.get(pair.name, {}) for pair in PAIRS}


def text_of(result: dict[str, dict[str, Record]]) -> str:
    """Returns the text of pairs.json: a line for each pair."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(held)}" for name, held in result.items()) + "\n}\n"


def build_all(pairs: Iterable[Pair], options: argparse.Namespace) -> None:
    """Builds what is asked for; each result is written as soon as it is there."""
    for backend in options.backends.split(","):
        for pair in pairs:
            held = read_result()[pair.name]
            is_open = backend == "onnxruntime" or held.get("onnxruntime", {}).get("outcome") == "built"
            is_due = needs_build(held.get(backend), is_retry=options.retry, is_again=options.again)
            if not options.full and not (is_open and is_due):
                continue
            is_narrow = not options.full and (options.narrow or backend in NARROW)
            record = build_pair(pair, backend, options.work, is_full=options.full, is_narrow=is_narrow)
            if is_narrow and backend not in NARROW and record["outcome"] == "built":
                record["is_narrow"] = True
            print(f"{pair.name} {backend}: {json.dumps(record)}", flush=True)
            if not options.full:
                result = read_result()  # another process may have written meanwhile
                result[pair.name][backend] = record
                RESULT.write_text(text_of(result))
                page.write(result)


def main() -> None:
    """Builds and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of pairs")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--retry", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--narrow", action="store_true")
    parser.add_argument("--work", type=Path, default=ROOT / "build/pairs")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name]
    build_all([BY_NAME[name] for name in names] or PAIRS, options)
    if not options.full:
        page.write(read_result())


if __name__ == "__main__":
    main()
