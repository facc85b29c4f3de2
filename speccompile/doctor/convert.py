# SPDX-License-Identifier: Apache-2.0
"""Writes a speculator in one of its method's layouts, one tensor at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speccompile.checkpoints.tensor_files import NUMPY_TYPES, TensorFiles, files_from_tensors
from speccompile.doctor.doctor import Checkpoint, canonical_from_case, findings_from_case, make_case
from speccompile.doctor.findings import Finding
from speccompile.doctor.layouts import Case, Format, Target
from speccompile.errors import CheckpointError, RecipeError

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES = 1 << 24


def layout_named(name: str, formats: tuple[Format, ...], method: str) -> Format:
    """Returns the layout of a method that can be written under that name."""
    own = {f.name.partition("/")[2]: f for f in formats if f.method == method and f.config is not None}
    if name not in own:
        raise RecipeError("--to", repr(name), f"one of {', '.join(own)} for {method}", "Choose another layout.")
    return own[name]


def convertible(case: Case) -> tuple[Finding, ...]:
    """Returns the findings that stop a conversion: the errors, except padding that it cuts."""
    cuts = _extra_rows(case) > 0
    errors = [f for f in findings_from_case(case) if f.severity == "error"]
    return tuple(f for f in errors if not (cuts and f.check == "target.vocabulary"))


def _extra_rows(case: Case) -> int:
    size, target = case.sizes.get("vocab"), case.target
    if target is None or size is None or not 0 < target.num_tokens <= target.dims.vocab_size:
        return 0
    return max(size - target.dims.vocab_size, 0)


def write_case(folder: Path, layout: Format, case: Case) -> None:
    """Writes a checkpoint that was examined and is `convertible`, without padding, into an empty folder."""
    config, tensors = canonical_from_case(case)
    if _extra_rows(case):
        config, tensors = _cut_vocabulary(case, config, tensors)
    write_speculator(folder, layout, config, tensors, case.target)


def _cut_vocabulary(
    case: Case, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    assert case.target is not None
    vocab, size = case.target.dims.vocab_size, case.sizes["vocab"]
    rows = {e.name: e.row.dims for e in case.expected.values()}
    # A draft vocabulary equal to the target's is cut with it.
    whole = ("vocab", "draft_vocab") if case.sizes.get("draft_vocab") == size else ("vocab",)
    cut = {name: t[:vocab] if rows[name][0] in whole else t for name, t in tensors.items()}
    names = ("vocab_size", "draft_vocab_size", "truncated_vocab_size")
    return {k: vocab if k in names and v == size else v for k, v in config.items()}, cut


def write_speculator(
    folder: Path,
    layout: Format,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    target: Target | None = None,
) -> None:
    """Writes config.json and model.safetensors.

    Args:
        tensors: by the names of the canonical layout; dtypes are kept.
        target: the model that the layout's config names.

    Raises:
        CheckpointError: the layout is not written, or config and tensors are not a complete speculator.
    """
    assert layout.config is not None
    written = layout.config(config, target)
    files = _named(layout, written, files_from_tensors(tensors), folder)
    case = make_case(Checkpoint(folder, written, files, layout), layout, reads_values=False)
    wrong = [f for check in layout.checks for f in check.run(case) if f.severity == "error"]
    if wrong:
        raise CheckpointError(wrong[0].where, wrong[0].got, wrong[0].expected, wrong[0].todo)
    write_safetensors(folder / "model.safetensors", files)
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _named(layout: Format, config: Mapping[str, Any], stored: TensorFiles, folder: Path) -> TensorFiles:
    probe = make_case(Checkpoint(folder, config, stored, layout), layout)
    expected = layout.expand(probe.sizes, layout.prefixes[0])
    kept: dict[str, torch.Tensor] = {}
    left = set(stored.headers)
    for want in expected.values():
        if want.name not in stored.headers:
            continue
        left.discard(want.name)
        if not want.fallback or want.row.may_differ:
            kept[want.key] = stored.tensor(want.name)
    if left:
        got, todo = f"{sorted(left)[0]} ({len(left)} such)", "Choose a layout that has it."
        raise CheckpointError(layout.label, got, "tensors that the layout has", todo)
    return files_from_tensors(kept)


def write_safetensors(path: Path, files: TensorFiles) -> None:
    """Writes one file, its header first, then the tensors in order; at most one chunk is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in files.headers.items():
        size_bytes = tensor.size * np.dtype(NUMPY_TYPES[tensor.dtype]).itemsize
        header[key] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + size_bytes]}
        end += size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin aligned, as safetensors writes them
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key in files.headers:
            flat = files.array(key).reshape(-1).view(np.uint8)
            for start in range(0, flat.size, _CHUNK_BYTES):
                file.write(flat[start : start + _CHUNK_BYTES].tobytes())
