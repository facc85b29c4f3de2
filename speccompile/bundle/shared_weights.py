# SPDX-License-Identifier: Apache-2.0
"""One data file for graphs with the same weights: weights that a second graph shares are not written twice.

Readers of ONNX load external data only from a graph's own folder, so the second graph moves beside the first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from speccompile.common.disk import error_from_fault

ALIGNMENT = 4096  # alignment of tensors in a data file, so that each can be mapped separately


def share_weights(owner: Path, borrower: Path) -> tuple[Path, int]:
    """Makes a graph refer to tensors that another one's data file has already.

    Args:
        owner: graph file with its data beside it; neither is changed.
        borrower: graph file in a folder of its own, which is removed. Other graphs there have the same data.

    Returns:
        The borrower's new graph file, and the bytes that were not written again.
    """
    import onnx_ir as ir

    shared = owner.with_name(f"{borrower.parent.name}.onnx")
    try:
        held = {
            _key(tensor): (str(tensor.location), tensor.offset or 0) for tensor in _external_tensors(ir.load(owner))
        }
        data = shared.with_name(f"{shared.name}.data")
        with data.open("wb") as sink:
            offsets = _Offsets(held, data.name, sink)
            for file in sorted(borrower.parent.glob("*.onnx"), key=lambda file: file != borrower):
                model = ir.load(file)
                for value in model.graph.initializers.values():
                    if isinstance(tensor := value.const_value, ir.ExternalTensor):
                        value.const_value = ir.ExternalTensor(
                            *offsets.find(tensor), tensor.nbytes, tensor.dtype, shape=tensor.shape,
                            name=str(value.name), base_dir=owner.parent,
                        )  # fmt: skip
                ir.save(model, owner.with_name(file.name.replace(borrower.stem, shared.stem, 1)))
        if data.stat().st_size == 0:
            data.unlink()
        for file in borrower.parent.iterdir():
            file.unlink()
        borrower.parent.rmdir()
    except OSError as fault:
        raise error_from_fault(fault, shared) from fault
    return shared, offsets.saved


class _Offsets:
    """Where the borrower's tensors will be: where the owner has them (`held`), or in a new data file `name`."""

    def __init__(self, held: Mapping[Any, tuple[str, int]], name: str, sink: BinaryIO) -> None:
        self.held, self.name, self.sink, self.saved = held, name, sink, 0
        self._found: dict[tuple[str, int, int], tuple[str, int]] = {}  # by where the borrower had them

    def find(self, tensor: Any) -> tuple[str, int]:
        """Returns file and offset of a tensor; one that is in neither file is written."""
        before = (str(tensor.location), int(tensor.offset or 0), int(tensor.nbytes))
        if before not in self._found:
            found = self.held.get(_key(tensor))
            if found is None:
                self.sink.write(bytes(-self.sink.tell() % ALIGNMENT))
                found = (self.name, self.sink.tell())
                self.sink.write(tensor.tobytes())
            else:
                self.saved += tensor.nbytes
            self._found[before] = found
        return self._found[before]


def _external_tensors(model: Any) -> list[Any]:
    import onnx_ir as ir

    tensors = [value.const_value for value in model.graph.initializers.values()]
    return [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]


def _key(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor.tobytes()).digest()
