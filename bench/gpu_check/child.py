# SPDX-License-Identifier: Apache-2.0
"""One section in a process of its own: python -m bench.gpu_check.child SECTION WORK ANSWER.json."""

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


def ort_cuda(work: Path) -> dict[str, Any]:
    """Checks and measures ONNX Runtime's CUDA provider."""
    from bench.gpu_check.ort_cuda import run

    return run(work)


def tensorrt(work: Path) -> dict[str, Any]:
    """Checks and measures full TensorRT."""
    from bench.gpu_check.plans import run

    return run("tensorrt", work)


def tensorrt_rtx(work: Path) -> dict[str, Any]:
    """Checks and measures TensorRT-RTX: in a process of its own, as one holds one TensorRT."""
    from bench.gpu_check.plans import run

    return run("tensorrt_rtx", work)


SECTIONS = {
    "machine": machine,
    "kernels": kernels,
    "ort-cuda": ort_cuda,
    "tensorrt": tensorrt,
    "tensorrt-rtx": tensorrt_rtx,
}


def main() -> None:
    section, work, answer = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    try:
        held = SECTIONS[section](work)
    except SpecCompileError as fault:
        held = {"status": report.FAILED, "reason": f"{type(fault).__name__}: {fault}", "rows": []}
    except ModuleNotFoundError as fault:
        held = report.not_run(f"no package {fault.name}: run make gpu-env")
    answer.write_text(json.dumps(held, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
