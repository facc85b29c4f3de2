# SPDX-License-Identifier: Apache-2.0
"""One data file for graphs with the same weights: weights that a second graph shares are not written twice.

Readers of ONNX load external data only from a graph's own folder, so the second graph moves beside the first.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from speccompile.common.disk import error_from_fault

ALIGNMENT = 4096  # alignment of tensors in a data file, so that each can be mapped separately


def share_weights(owner: Path, borrower: Path) -> tuple[Path, int]:
    """Make a graph refer to tensors that another one's data file has already.

    Args:
        owner: graph file with its data beside it; neither is changed.
        borrower: graph file in a folder of its own, which is removed.

    Returns:
        The borrower's new graph file, and the bytes that were not written again.
    """
    import onnx_ir as ir

    shared = owner.with_name(f"{borrower.parent.name}.onnx")
    try:
        held = {_key(tensor): tensor for tensor in _external_tensors(ir.load(owner))}
        model = ir.load(borrower)
        data, saved = shared.with_name(f"{shared.name}.data"), 0
        with data.open("wb") as sink:
            for value in model.graph.initializers.values():
                tensor = value.const_value
                if not isinstance(tensor, ir.ExternalTensor):
                    continue
                same = held.get(_key(tensor))
                if same is None:
                    sink.write(bytes(-sink.tell() % ALIGNMENT))
                    location, offset = data.name, sink.tell()
                    sink.write(tensor.tobytes())
                else:
                    location, offset = str(same.location), same.offset or 0
                    saved += tensor.nbytes
                value.const_value = ir.ExternalTensor(
                    location, offset, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=str(value.name),
                    base_dir=owner.parent,
                )  # fmt: skip
        ir.save(model, shared)
        if data.stat().st_size == 0:
            data.unlink()
        for file in borrower.parent.iterdir():
            file.unlink()
        borrower.parent.rmdir()
    except OSError as fault:
        raise error_from_fault(fault, shared) from fault
    return shared, saved


def _external_tensors(model: Any) -> list[Any]:
    import onnx_ir as ir

    tensors = [value.const_value for value in model.graph.initializers.values()]
    return [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]


def _key(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor.tobytes()).digest()
