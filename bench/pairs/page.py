# SPDX-License-Identifier: Apache-2.0
"""The generated part of docs/reference/pairs.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.pairs.narrow import MAX_KV_HEADS, MAX_WIDTH
from bench.pairs.rows import MAX_CHOSEN, MAX_DRAFT_VOCAB, MAX_EXPERTS, MAX_VOCAB, PAIRS, Pair

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/pairs.md"
BEGIN, END = "<!-- begin: written by bench/pairs/main.py -->", "<!-- end: written by bench/pairs/main.py -->"
Records = Mapping[str, Mapping[str, Mapping[str, Any]]]


def block(result: Records) -> str:
    """Returns the generated part.

    Args:
        result: the records by pair and backend.
    """
    counts = {
        backend: sum(held.get(backend, {}).get("outcome") == "built" for held in result.values())
        for backend in ("onnxruntime", "tensorrt")
    }
    num_narrow = sum(bool(held.get("onnxruntime", {}).get("is_narrow")) for held in result.values())
    lines = [
        BEGIN,
        f"Of {len(PAIRS)} pairs, {counts['onnxruntime']} build on ONNX Runtime ({num_narrow} of them narrow only), and "
        f"{counts['tensorrt']} of these to TensorRT-RTX plans.",
        "",
        f"Vocabularies are cut to {MAX_VOCAB} tokens (of drafts to {MAX_DRAFT_VOCAB}), experts to {MAX_EXPERTS} "
        f"({MAX_CHOSEN} active), drafters to two layers of a kind (P-EAGLE: four). Plans, and pairs marked narrow, "
        f"have smaller widths too: at most {MAX_WIDTH} (1024 where heads need it), and {MAX_KV_HEADS} K and V heads.",
        "",
        "| family | speculator | target's sizes | `method` | builds |",
        "|---|---|---|---|---|",
        *(_row(pair, result[pair.name]) for pair in PAIRS),
        "",
        "| pair | refused for |",
        "|---|---|",
        *_reasons(result),
        END,
    ]
    return "\n".join(lines)


def _row(pair: Pair, held: Mapping[str, Mapping[str, Any]]) -> str:
    few = f", {pair.max_experts} experts" if pair.max_experts < MAX_EXPERTS else ""
    return f"| {pair.family} | {pair.speculator} | {pair.model}{few} | `{pair.method}` | {_cell(held)} |"


def _cell(held: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns `yes` where both backends build a pair, `narrow` where only narrow layers were built, or what failed."""
    first, second = (held.get(backend, {}).get("outcome", "not run") for backend in ("onnxruntime", "tensorrt"))
    if first != "built":
        return str(first)
    narrow = "narrow" if held["onnxruntime"].get("is_narrow") else ""
    return (narrow or "yes") if second == "built" else f"ONNX Runtime{', ' * bool(narrow)}{narrow}"


def _reasons(result: Records) -> list[str]:
    rows = []
    labels = {"onnxruntime": "", "tensorrt": " on TensorRT-RTX"}
    for pair in PAIRS:
        for backend, label in labels.items():
            record = result[pair.name].get(backend)
            if record is not None and record["outcome"] != "built":
                told = "" if record["outcome"] == "refused" else f"{record['outcome']}: "
                reason = str(record["reason"]).replace("|", "\\|").replace("<", "&lt;")
                rows.append(f"| {pair.family}, {pair.speculator.partition(' (')[0]}{label} | {told}{reason} |")
    return rows


def write(result: Records) -> None:
    """Writes the generated part of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + block(result) + rest.partition(END)[2])
