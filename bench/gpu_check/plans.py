# SPDX-License-Identifier: Apache-2.0
"""TensorRT or TensorRT-RTX, end to end on the example pair, where the variant supports the GPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import speccompile
from bench.gpu_check import checks, decoding, parts, report
from speccompile.backends.tensorrt.import_helper import find_compute_capabilities, installed_variants, load_tensorrt
from speccompile.core.sampling import SamplingParams

MAX_TIE_GAP = 0.1  # float16 logits of magnitude 16 to 32 are 1/64 apart, and errors of 16 layers add up


class Plans(parts.Subject):
    """A variant of TensorRT.

    Args:
        name: `tensorrt` or `tensorrt_rtx`.
    """

    max_tie_gap = MAX_TIE_GAP

    def __init__(self, name: str) -> None:
        self.name = name
        self.overrides = ("engine.backend=tensorrt", f"engine.variant={name}", "target.dtype=float16")

    def why_not_run(self) -> dict[str, Any] | None:
        if self.name not in installed_variants():
            return report.not_run(f"{self.name} is not installed: run make gpu-env")
        variant = load_tensorrt(self.name)
        major, minor = find_compute_capabilities()[0]
        known = variant.can.target_capabilities
        if not known or (major, minor) in known:
            return None
        listed = ", ".join(f"sm_{a}{b}" for a, b in known)
        why = f"{self.name} {variant.version} does not support sm_{major}{minor}; its documented list is {listed}"
        return report.not_run(why)

    def tokens(self, work: Path) -> dict[str, Any]:
        """Is each plan valid; then equality, CUDA graphs, memory."""
        variant, bundle = load_tensorrt(self.name), self.build(work)
        rows = [report.row("version", variant.version), *_validity_rows(variant, bundle)]
        rows += self.equality_rows(bundle, decoding.Reference())
        prompts = [r["prompt_ids"] for r in decoding.golden_rows()[: decoding.NUM_TIMED]]
        rows += checks.loading_rows(bundle, prompts[0], _forget_kernels)
        engine = speccompile.load(bundle)
        engine.generate(prompts, SamplingParams(max_new_tokens=40))
        if engine.engines[0].plan.captures_itself:
            rows += checks.own_capture_rows(bundle, work / "without-graphs", prompts[:4])
        else:
            rows += checks.graph_rows(engine)
        rows += checks.activation_rows(engine)
        rows.append(checks.memory_row(engine.engines[0].plan.device, engine, prompts))
        return report.result(rows)


def _validity_rows(variant: Any, bundle: Path) -> list[dict[str, Any]]:
    from speccompile.backends.tensorrt.loading import validity_from_plan
    from speccompile.bundle.bundle import read_bundle

    record, rows = read_bundle(bundle), []
    for graph in record.graphs:
        validity = validity_from_plan(variant, record.graph_path(graph).read_bytes())
        got, is_valid = f"{validity['validity']} {validity['diagnostics']}", validity["validity"] != "INVALID"
        rows.append(report.row(f"validity of plan {graph}", got, "not INVALID", is_valid))
    return rows


def _forget_kernels() -> None:
    """Removes the kernels that earlier loads compiled."""
    from speccompile.common.cache_root import find_cache_folder

    folder = find_cache_folder("tensorrt")
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
