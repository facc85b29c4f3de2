# SPDX-License-Identifier: Apache-2.0
"""What a planned build needs, beside what this machine has: memory, the GPU's, disks, and time by earlier builds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speccompile.backends.memory import available_memory, gpu_memory
from speccompile.recipe.plan import BuildPlan

# Of 41 builds of published sizes with few layers (docs/reference/pairs.md), on two shared cores, four in five took this
# long for each GiB of float32 weights; a small build takes its time to measure steps.
_SECONDS_PER_GIB = (45, 430)
_SECONDS = (20, 120)
TIME_BASIS = "as 41 builds on two busy cores: 45 to 430 s for each GiB of float32 weights; calibration comes on top"


def build_seconds(plan: BuildPlan, predicted: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns how long a build takes, from and to; None where no builds of this backend are at hand to say so.

    Args:
        predicted: its sizes: {"graphs": {name: {"num_params"}}}.
    """
    if plan.engine.backend != "onnxruntime":
        return None
    gib = 4 * sum(graph["num_params"] for graph in predicted["graphs"].values()) / 2**30
    low, high = (round(base + rate * gib) for base, rate in zip(_SECONDS, _SECONDS_PER_GIB, strict=True))
    return low, high


def compare(plan: BuildPlan, predicted: Mapping[str, Any], disks: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Returns what is needed and what is there.

    Args:
        predicted: its sizes: {"total": {"build_peak_bytes", "runtime_bytes", "bundle_bytes"}}.
        disks: folders by what is written there, as much as the bundle is large; they need not exist.

    Returns:
        {"what", "where", "needed_bytes", "free_bytes", "todo"}; `free_bytes` is None where it is not known.
    """
    total = predicted["total"]
    is_gpu = plan.engine.device == "cuda"
    free = available_memory() or None
    rows = [("building", "memory", total["build_peak_bytes"], free, "Build on a larger machine.")]
    home = ("the GPU's memory", gpu_memory()) if is_gpu else ("memory", free)
    todo = "Quantise, or lower engine.max_batch_size or engine.max_seq_len."
    rows.append(("decoding", home[0], total["runtime_bytes"], home[1], todo))
    by_disk: dict[int, list[str]] = {}
    for name, folder in disks.items():
        by_disk.setdefault(os.stat(_existing(folder)).st_dev, []).append(name)
    for names in by_disk.values():
        where = _existing(disks[names[0]])
        needed, todo = len(names) * total["bundle_bytes"], "Free space, or choose another disk (-o, SPECCOMPILE_CACHE)."
        rows.append((" and ".join(names), f"the disk of {where}", needed, _free(where), todo))
    keys = ("what", "where", "needed_bytes", "free_bytes", "todo")
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _existing(folder: Path) -> Path:
    whole = folder.absolute()
    return next(path for path in (whole, *whole.parents) if path.is_dir())


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free
