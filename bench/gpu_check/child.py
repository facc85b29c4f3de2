# SPDX-License-Identifier: Apache-2.0
"""One section in a process of its own: python -m bench.gpu_check.child SECTION WORK ANSWER.json [--quick]."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from bench.gpu_check import report
from speccompile.errors import SpecCompileError


def machine(work: Path) -> dict[str, Any]:
    """Returns what cuda-python reports of the GPU."""
    from speccompile.backends.cuda.device import open_device

    held = open_device(0).properties()
    return report.result([report.row("device", held["name"])], machine=held)


def kernels(work: Path) -> dict[str, Any]:
    """Compares the plugins' kernels with their numpy twins and with a copy of the device's memory."""
    run = importlib.import_module("bench.gpu_check.kernels").run
    return dict(run())


def subject_of(backend: str) -> Any:
    """Returns the `parts.Subject` of that name; each imports packages of its own."""
    if backend == "ort-cuda":
        return importlib.import_module("bench.gpu_check.ort_cuda").OrtCuda()
    return importlib.import_module("bench.gpu_check.plans").Plans(backend.replace("-", "_"))


def run_part(name: str, work: Path) -> dict[str, Any]:
    """Runs BACKEND.PART: a process holds one TensorRT, and one that dies hides no other part."""
    from bench.gpu_check import parts

    backend, _, part = name.partition(".")
    return parts.run(subject_of(backend), part, work)


SECTIONS = {"machine": machine, "kernels": kernels}
# With --quick: about four minutes on an H100 once the bundles are there.
QUICK = {
    "decoding": {"NUM_PROMPTS": 24, "NUM_TOKENS": 64, "NUM_TIMED": 8, "ROUNDS": 2, "NUM_REFERENCE": 2},
    "checks": {"NUM_REQUESTS": 200, "NUM_WARM": 60, "SECONDS": 8.0, "ROUNDS": 2},
}


def shorten() -> None:
    """Does fewer prompts, tokens, rounds, requests and seconds."""
    for module, sizes in QUICK.items():
        held = importlib.import_module(f"bench.gpu_check.{module}")
        for name, size in sizes.items():
            assert hasattr(held, name), f"{module} has no {name}"
            setattr(held, name, size)


def main() -> None:
    section, work, answer = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    try:
        if "--quick" in sys.argv[4:]:
            shorten()
        held = run_part(section, work) if "." in section else SECTIONS[section](work)
    except SpecCompileError as fault:
        held = {"status": report.FAILED, "reason": f"{type(fault).__name__}: {fault}", "rows": []}
    except ModuleNotFoundError as fault:
        held = report.not_run(f"no package {fault.name}: run make gpu-env")
    answer.write_text(json.dumps(held, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
