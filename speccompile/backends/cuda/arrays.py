# SPDX-License-Identifier: Apache-2.0
"""Arrays that stay on the device, and numpy's dtypes of graph tensors."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.backends.cuda.device import Device, Memory
from speccompile.errors import RuntimeFault

_ITEM_BYTES = {"bfloat16": 2}


def item_bytes(dtype: str) -> int:
    """Returns the bytes of one element of a spec's dtype."""
    return _ITEM_BYTES.get(dtype) or np.dtype(dtype).itemsize


def host_dtype(dtype: str) -> np.dtype[Any]:
    """Returns the numpy dtype of a spec's dtype. Raises RuntimeFault: bfloat16 needs ml_dtypes."""
    if dtype != "bfloat16":
        return np.dtype(dtype)
    try:
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError as fault:
        todo = "Run: pip install ml-dtypes"
        raise RuntimeFault("a bfloat16 array", str(fault), "the package ml-dtypes", todo) from fault


class DeviceArray:
    """An output that stays on the device; valid until the next run of the engine that made it.

    `numpy.asarray` copies it to the host; engines of the same device read it in place. `dtype` is as in specs.
    """

    def __init__(
        self, device: Device, address: int, shape: tuple[int, ...], dtype: str, memory: Memory | None = None
    ) -> None:
        self.device, self.address, self.shape, self.dtype = device, address, shape, dtype
        self._memory = memory

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("an array on a CUDA device cannot be read without a copy")
        array = np.empty(self.shape, host_dtype(self.dtype))
        self.device.activate()
        self.device.copy(array.ctypes.data, self.address, array.nbytes)
        self.device.synchronize()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> NDArray[Any]:
        part: NDArray[Any] = np.asarray(self)[index]
        return part

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype}{list(self.shape)} at {self.address:#x} on cuda:{self.device.ordinal})"
