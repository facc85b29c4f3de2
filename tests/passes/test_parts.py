# SPDX-License-Identifier: Apache-2.0
"""A constant of parts equals the whole, and one part exists at a time while it is written."""

import gc
import io
import weakref
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.passes.parts import PartsTensor

TYPES = (ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.UINT8, ir.DataType.INT4)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
def test_what_is_written_is_the_whole(dtype):
    whole = np.arange(-24, 24).reshape(3, 2, 8).astype(np.int8 if dtype == ir.DataType.UINT8 else np.float32)
    whole = (whole % 8).astype(dtype.numpy())
    tensor = PartsTensor(lambda: (part.T for part in whole.transpose(0, 2, 1)), dtype, whole.shape, "w")
    file = io.BytesIO()
    tensor.tofile(file)
    assert file.getvalue() == tensor.tobytes() == ir.tensor(whole, dtype=dtype).tobytes()
    assert np.array_equal(tensor.numpy(), whole) and tensor.nbytes == len(file.getvalue())


def test_one_part_exists_at_a_time():
    held: list[weakref.ref[np.ndarray]] = []

    def parts() -> Iterator[np.ndarray]:
        for number in range(4):
            gc.collect()
            assert sum(part() is not None for part in held) <= 1
            part = np.full((2, 3), number, np.float32)
            held.append(weakref.ref(part))
            yield part

    PartsTensor(parts, ir.DataType.FLOAT, (4, 2, 3), "w").tofile(io.BytesIO())
    assert len(held) == 4
