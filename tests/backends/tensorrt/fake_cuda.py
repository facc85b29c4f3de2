# SPDX-License-Identifier: Apache-2.0
"""The part of `cuda.bindings.runtime` that the backend calls, over host memory.

Strict where a GPU would be silent or would crash: work on a stream waits until it is synchronised, every address must
belong to memory that is allocated, fresh memory is full of NaN, freed memory is gone, a copy must not overlap itself.
"""

import ctypes
import inspect
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace

import numpy as np

ALIGNMENT = 256
Work = Callable[[], None]


class Status(IntEnum):
    """Some of `cudaError_t`."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorNoDevice = 100
    cudaErrorECCUncorrectable = 214
    cudaErrorNvlinkUncorrectable = 220
    cudaErrorContained = 226
    cudaErrorIllegalAddress = 700
    cudaErrorLaunchTimeout = 702
    cudaErrorContextIsDestroyed = 709
    cudaErrorAssert = 710
    cudaErrorHardwareStackError = 714
    cudaErrorIllegalInstruction = 715
    cudaErrorMisalignedAddress = 716
    cudaErrorInvalidAddressSpace = 717
    cudaErrorInvalidPc = 718
    cudaErrorLaunchFailure = 719
    cudaErrorTensorMemoryLeak = 721
    cudaErrorMpsClientTerminated = 810
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorExternalDevice = 911
    cudaErrorUnknown = 999


class FakeCuda:
    """One device.

    Args:
        capacity_bytes: device memory.
        num_devices: 0 for a machine without a GPU.
    """

    cudaStreamNonBlocking = 1
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeRelaxed=2)

    def __init__(self, capacity_bytes: int = 1 << 30, num_devices: int = 1) -> None:
        self.capacity_bytes, self.num_devices = capacity_bytes, num_devices
        self.current = 0  # the thread's device
        self.capability = (9, 0)
        self.device: dict[int, np.ndarray] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self._buffers: dict[int, np.ndarray] = {}
        self.queue: list[Work] = []
        self.captured: list[Work] | None = None
        self.can_capture = True
        self.copies: list[tuple[str, int]] = []  # direction, bytes, of those that crossed to or from the host
        self.num_launches = 0

    def cudaGetDeviceCount(self):
        return (Status.cudaSuccess, self.num_devices) if self.num_devices else (Status.cudaErrorNoDevice, None)

    def cudaSetDevice(self, ordinal):
        if not 0 <= ordinal < self.num_devices:
            return (Status.cudaErrorInvalidValue,)
        self.current = ordinal
        return (Status.cudaSuccess,)

    def cudaGetErrorName(self, status):
        return Status.cudaSuccess, Status(status).name.encode()

    def cudaGetErrorString(self, status):
        return Status.cudaSuccess, f"text of {int(status)}".encode()

    def cudaGetLastError(self):
        return (Status.cudaSuccess,)

    def cudaMemGetInfo(self):
        used = sum(memory.nbytes for memory in self.device.values())
        return Status.cudaSuccess, self.capacity_bytes - used, self.capacity_bytes

    def cudaDriverGetVersion(self):
        return Status.cudaSuccess, 13000

    cudaRuntimeGetVersion = cudaDriverGetVersion

    def cudaGetDeviceProperties(self, ordinal):
        major, minor = self.capability
        return Status.cudaSuccess, SimpleNamespace(name=b"Fake GPU\0\0", major=major, minor=minor)

    def cudaStreamCreateWithFlags(self, flags):
        assert flags == self.cudaStreamNonBlocking
        return Status.cudaSuccess, 7

    def _allocate(self, held, size):
        whole = np.full(size + ALIGNMENT, 0xFF, np.uint8)  # NaN in every float dtype
        address = -(-whole.ctypes.data // ALIGNMENT) * ALIGNMENT
        start = address - whole.ctypes.data
        held[address] = whole[start : start + size]
        self._buffers[address] = whole
        return Status.cudaSuccess, address

    def cudaMalloc(self, size):
        if size > self.cudaMemGetInfo()[1]:
            return Status.cudaErrorMemoryAllocation, None
        return self._allocate(self.device, size)

    def cudaMallocHost(self, size):
        return self._allocate(self.pinned, size)

    def cudaFree(self, address):
        self._run_queue()
        del self.device[address]
        return (Status.cudaSuccess,)

    def cudaFreeHost(self, address):
        self._run_queue()
        del self.pinned[address]
        return (Status.cudaSuccess,)

    def place_of(self, address, size):
        """Returns `device`, `pinned` or `host`: the memory of all these bytes."""
        for name, held in (("device", self.device), ("pinned", self.pinned)):
            for start, memory in list(held.items()):  # a finaliser may free memory meanwhile
                if start <= address < start + memory.nbytes:
                    assert address + size <= start + memory.nbytes, "runs over the end of an allocation"
                    return name
        return "host"

    def view(self, address, shape, dtype):
        """Device memory as an array."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        assert size == 0 or self.place_of(address, size) == "device", f"{address:#x} is no device memory"
        raw = (ctypes.c_uint8 * size).from_address(address)
        return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape)

    def submit(self, work):
        """Put work on the stream."""
        (self.queue if self.captured is None else self.captured).append(work)

    def _run_queue(self):
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def cudaMemcpyAsync(self, dest, source, size, kind, stream):
        assert kind == 4 and stream == 7
        kinds = self.place_of(source, size), self.place_of(dest, size)
        assert kinds[0] != "host", "a copy from pageable memory waits for the host"
        assert dest + size <= source or source + size <= dest, "overlapping copy"

        def work():
            assert (self.place_of(source, size), self.place_of(dest, size)) == kinds, "copies freed memory"
            ctypes.memmove(dest, source, size)
            if kinds != ("device", "device"):
                self.copies.append(("in" if kinds[1] == "device" else "out", size))

        self.submit(work)
        return (Status.cudaSuccess,)

    def cudaMemcpy2DAsync(self, dest, dest_pitch, source, source_pitch, width, height, kind, stream):
        assert width <= min(dest_pitch, source_pitch)
        for row in range(height):
            self.cudaMemcpyAsync(dest + row * dest_pitch, source + row * source_pitch, width, kind, stream)
        return (Status.cudaSuccess,)

    def cudaMemsetAsync(self, address, value, size, stream):
        assert self.place_of(address, size) == "device"
        self.submit(lambda: ctypes.memset(address, value, size))
        return (Status.cudaSuccess,)

    def cudaStreamSynchronize(self, stream):
        assert stream == 7 and self.captured is None, "a wait inside a capture"
        self._run_queue()
        return (Status.cudaSuccess,)

    def cudaStreamBeginCapture(self, stream, mode):
        assert stream == 7 and mode == 2 and self.captured is None
        self.captured = []
        return (Status.cudaSuccess,)

    def cudaStreamEndCapture(self, stream):
        captured, self.captured = self.captured, None
        if not self.can_capture:
            return Status.cudaErrorStreamCaptureUnsupported, None
        return Status.cudaSuccess, captured

    def cudaGraphInstantiate(self, graph, flags):
        return Status.cudaSuccess, list(graph)

    def cudaGraphDestroy(self, graph):
        return (Status.cudaSuccess,)

    def cudaGraphExecDestroy(self, graph):
        graph.clear()
        return (Status.cudaSuccess,)

    def cudaGraphLaunch(self, graph, stream):
        assert graph and stream == 7
        self.num_launches += 1
        self.queue += graph
        return (Status.cudaSuccess,)


class FailingCuda(FakeCuda):
    """A device that fails at one call.

    Args:
        fails_at: (function, how many calls of it come before); None: none fails.
        status: of that call.
        lasts: all later calls fail as well, as on a GPU.

    Attributes:
        calls: how often each function was called.
        has_failed: it did.
    """

    def __init__(self, fails_at=None, status=Status.cudaErrorIllegalAddress, lasts=True):
        super().__init__()
        self.fails_at, self.status, self.lasts = fails_at, status, lasts
        self.calls, self.has_failed, self._is_inside = Counter(), False, False

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if not name.startswith("cuda") or name.startswith("cudaGetError") or not inspect.ismethod(value):
            return value
        return lambda *arguments: self._answer(name, value, arguments)

    def _answer(self, name, function, arguments):
        if self._is_inside:  # a call by the fake itself
            return function(*arguments)
        fails = self.fails_at == (name, self.calls[name])
        self.calls[name] += 1
        if fails or (self.lasts and self.has_failed):
            self.has_failed = True
            return self.status, None
        self._is_inside = True
        try:
            return function(*arguments)
        finally:
            self._is_inside = False
