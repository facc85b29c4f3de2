# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's CUDA execution provider, end to end on the example pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.gpu_check import decoding, report

MAX_TIE_GAP = 1e-3  # float32 without TF32; kernels add in another order than torch's


def run(work: Path) -> dict[str, Any]:
    """Build with `engine.device: cuda`, compare with transformers, time."""
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return report.not_run(
            f"onnxruntime {onnxruntime.__version__} has no CUDA provider: "
            "pip uninstall onnxruntime, pip install onnxruntime-gpu"
        )
    bundle = decoding.build_pair(work, "ort-cuda", "engine.backend=onnxruntime", "engine.device=cuda")
    reference = decoding.Reference()
    wanted = decoding.reference_rows(reference)
    rows = [report.row("reference", "golden file" if reference.model is None else "transformers on this GPU, fp32")]
    rows += decoding.equality_rows(bundle, wanted, reference, MAX_TIE_GAP)
    timed, raw = decoding.speed_rows(bundle, wanted, reference)
    return report.result([*rows, *timed], raw=raw)
