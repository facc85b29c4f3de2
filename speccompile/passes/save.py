# SPDX-License-Identifier: Apache-2.0
"""Write a graph and its external data, one tensor at a time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
from onnx_ir.external_data import CallbackInfo

from speccompile.common.disk import error_from_fault

INLINE_BYTES = 1024  # smaller tensors stay in the graph file, where shape inference can read them


def save_model(model: ir.Model, path: Path, progress: Callable[[str], None] | None = None) -> list[Path]:
    """Saves to `path` and `path`.data (external data), both flushed to the disk; returns the files.

    Args:
        model: weights may be lazy; each is materialised only while it is written.
        progress: called with "write weights DONE/TOTAL": passes leave work on weights to this moment.
    """
    data = path.with_name(path.name + ".data")
    done = itertools.count()

    def tell(tensor: ir.TensorProtocol, info: CallbackInfo) -> None:
        if progress is not None:
            progress(f"write weights {next(done)}/{info.total}")

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ir.save(model, path, None, data.name, INLINE_BYTES, callback=tell, max_in_flight_bytes=1 << 28)
        files = [f for f in (path, data) if f.exists()]
        for file in files:
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    except OSError as fault:
        raise error_from_fault(fault, path) from fault
    return files
