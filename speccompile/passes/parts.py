# SPDX-License-Identifier: Apache-2.0
"""A constant that is made and written part by part, so that no copy of the whole exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir


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
