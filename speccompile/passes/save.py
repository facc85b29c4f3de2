# SPDX-License-Identifier: Apache-2.0
"""A graph and its external data, written one tensor at a time; constants of parts, written one part at a time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
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


class PartsTensor(ir.LazyTensor):
    """A constant whose parts along the first dim are made one after the other, each time that it is read."""

    def __init__(
        self, parts: Callable[[], Iterable[np.ndarray]], dtype: ir.DataType, shape: tuple[int, ...], name: str
    ) -> None:
        self.parts = parts
        super().__init__(self._stack, dtype, ir.Shape(shape), name=name)

    def _stack(self) -> ir.TensorProtocol:
        whole = np.empty(self.shape.numpy(), self.dtype.numpy())
        for at, part in enumerate(self.parts()):
            whole[at] = part
        return ir.tensor(whole, dtype=self.dtype, name=self.name)

    def tofile(self, file: Any) -> None:
        """Writes the parts to a binary file; those of less than a byte an element are packed."""
        for part in self.parts():
            file.write(ir.tensor(part, dtype=self.dtype).tobytes())
