# SPDX-License-Identifier: Apache-2.0
"""TensorRT or TensorRT-RTX, end to end on the example pair, where a variant supports the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.gpu_check import decoding, report

MAX_TIE_GAP = 0.1  # float16 logits of magnitude 16 to 32 are 1/64 apart, and errors of 16 layers add up


def run(work: Path) -> dict[str, Any]:
    """For each installed variant: is the GPU supported, is the plan valid, then equality and speed."""
    from speccompile.backends.tensorrt.import_helper import installed_variants

    names = installed_variants()
    if not names:
        return report.not_run("neither tensorrt nor tensorrt_rtx is installed: pip install tensorrt or tensorrt-rtx")
    rows: list[dict[str, Any]] = []
    more: dict[str, Any] = {}
    reasons = []
    for name in names:
        made, reason, raw = _check(name, work)
        rows += made
        more[name] = raw
        reasons += [reason] if reason else []
    if len(reasons) == len(names):
        return {**report.not_run("; ".join(reasons)), "rows": rows}
    return report.result(rows, not_run="; ".join(reasons), **more)


def _check(name: str, work: Path) -> tuple[list[dict[str, Any]], str, dict[str, Any]]:
    """Returns rows, why it was not run, raw figures."""
    from speccompile.backends.tensorrt.import_helper import find_compute_capabilities, load_tensorrt
    from speccompile.backends.tensorrt.loading import validity_from_plan
    from speccompile.runtime.bundle import read_bundle

    variant = load_tensorrt(name)
    major, minor = find_compute_capabilities()[0]
    known = variant.can.target_capabilities
    rows = [report.row(f"{name}: version", variant.version)]
    if known and (major, minor) not in known:
        listed = ", ".join(f"sm_{a}{b}" for a, b in known)
        rows.append(report.row(f"{name}: supports sm_{major}{minor}", f"no, its documented list is {listed}"))
        return rows, f"{name} {variant.version} does not support sm_{major}{minor}", {}
    bundle = decoding.build_pair(work, name, "engine.backend=tensorrt", f"engine.variant={name}")
    record = read_bundle(bundle)
    for graph in record.graphs:
        validity = validity_from_plan(variant, record.graph_path(graph).read_bytes())
        got, is_valid = f"{validity['validity']} {validity['diagnostics']}", validity["validity"] != "INVALID"
        rows.append(report.row(f"{name}: validity of plan {graph}", got, "not INVALID", is_valid))
    reference = decoding.Reference()
    wanted = decoding.reference_rows(reference)
    for made in decoding.equality_rows(bundle, wanted, reference, MAX_TIE_GAP):
        rows.append({**made, "what": f"{name}: {made['what']}"})
    timed, raw = decoding.speed_rows(bundle, wanted, reference)
    rows += [{**made, "what": f"{name}: {made['what']}"} for made in timed]
    overrides = ("engine.backend=tensorrt", f"engine.variant={name}")
    for made in decoding.hybrid_rows(work, name, MAX_TIE_GAP, *overrides):
        rows.append({**made, "what": f"{name}: {made['what']}"})
    return rows, "", raw
