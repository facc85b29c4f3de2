# SPDX-License-Identifier: Apache-2.0
"""Folders of a speculator's weights: config.json beside one model.safetensors in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from speccompile.errors import CheckpointError

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def write_heads(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write both files; floats become bfloat16, integers and booleans are kept."""
    held = {k: (v.to(torch.bfloat16) if v.is_floating_point() else v) for k, v in tensors.items()}
    save_file({k: v.detach().cpu().contiguous() for k, v in held.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors makes it readable by the owner only
    (folder / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


def read_heads(folder: Path, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of model.safetensors, floats in float32, if they have exactly the `wanted` names and shapes.

    Raises:
        CheckpointError: no such file, a missing or left-over tensor, another shape.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(str(path), "no such file", "the weights of a speculator", "Check the folder.")
    stored, expected = load_file(path), f"{len(wanted)} tensors as {CONFIG} implies"
    todo = "Config and weights do not belong together: correct config.json, or fetch the folder again."
    check_tensors(str(path), wanted, stored, expected, todo)
    return {k: (v.float() if v.is_floating_point() else v) for k, v in stored.items()}


def check_tensors(
    where: str, wanted: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], expected: str, todo: str
) -> None:
    """Refuses tensors that are not exactly the wanted ones, in names and shapes."""
    missing, extra = sorted(set(wanted) - set(stored)), sorted(set(stored) - set(wanted))
    wrong = sorted(k for k in set(stored) & set(wanted) if stored[k].shape != wanted[k].shape)
    for names, got in ((missing, "missing"), (extra, "left over"), (wrong, "of another shape")):
        if names:
            raise CheckpointError(where, f"{names[0]} {got} ({len(names)} such tensors)", expected, todo)
