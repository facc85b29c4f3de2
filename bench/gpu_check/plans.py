# SPDX-License-Identifier: Apache-2.0
"""TensorRT or TensorRT-RTX, end to end on the example pair, where the variant supports the GPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import speccompile
from bench.gpu_check import checks, decoding, report
from speccompile.core.sampling import SamplingParams

MAX_TIE_GAP = 0.1  # float16 logits of magnitude 16 to 32 are 1/64 apart, and errors of 16 layers add up


def run(name: str, work: Path) -> dict[str, Any]:
    """Is the GPU supported, is each plan valid, then equality, CUDA graphs, memory, a server, and speed.

    Args:
        name: the variant, `tensorrt` or `tensorrt_rtx`.
        work: for bundles and logs.
    """
    from speccompile.backends.tensorrt.import_helper import (
        find_compute_capabilities,
        installed_variants,
        load_tensorrt,
    )

    if name not in installed_variants():
        return report.not_run(f"{name} is not installed: run make gpu-env")
    variant = load_tensorrt(name)
    major, minor = find_compute_capabilities()[0]
    known = variant.can.target_capabilities
    rows = [report.row("version", variant.version)]
    if known and (major, minor) not in known:
        listed = ", ".join(f"sm_{a}{b}" for a, b in known)
        rows.append(report.row(f"supports sm_{major}{minor}", f"no, its documented list is {listed}"))
        return {**report.not_run(f"{name} {variant.version} does not support sm_{major}{minor}"), "rows": rows}
    overrides = ("engine.backend=tensorrt", f"engine.variant={name}", "target.dtype=float16")
    bundle = decoding.build_pair(work, name, *overrides)
    rows += _validity_rows(variant, bundle)
    reference = decoding.Reference()
    wanted = decoding.reference_rows(reference)
    prompts = [r["prompt_ids"] for r in wanted[: decoding.NUM_TIMED]]
    rows += decoding.equality_rows(bundle, wanted, reference, MAX_TIE_GAP)
    rows += checks.loading_rows(bundle, prompts[0], _forget_kernels)
    engine = speccompile.load(bundle)
    engine.generate(prompts, SamplingParams(max_new_tokens=40))
    if engine.engines[0].engine.plan.captures_itself:
        rows += checks.own_capture_rows(bundle, work / "without-graphs", prompts[:4])
    else:
        rows += checks.graph_rows(engine)
    rows += checks.activation_rows(engine)
    rows.append(checks.memory_row(engine.engines[0].engine.plan.device, engine, prompts))
    timed, raw = decoding.speed_rows(bundle, wanted, reference)
    rows += [*timed, *decoding.hybrid_rows(work, name, MAX_TIE_GAP, *overrides)]
    rows += checks.server_rows(bundle, work)
    rows += checks.wide_rows(decoding.wide_builder(work, name, *overrides), decoding.MODEL, work)
    return report.result(rows, raw=raw)


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
