# SPDX-License-Identifier: Apache-2.0
"""A CUDA device through cuda-python's runtime bindings: memory, one stream, copies, captured graphs. No torch.

All engines of a device share its stream, so none waits for another's output. One thread at a time may use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from speccompile.common.extras import install_command
from speccompile.core.protocols import DeviceLost
from speccompile.errors import RuntimeFault, SpecCompileError

ALIGNMENT = 256  # bytes; alignment of cudaMalloc, required by TensorRT for every address
_ON_CPU = "build with engine.backend: onnxruntime and engine.device: cpu"
LOWER_MEMORY = "Lower engine.max_batch_size or engine.max_seq_len, or free memory of the GPU."
_TODO = {
    "cudaErrorMemoryAllocation": LOWER_MEMORY,
    "cudaErrorNoDevice": f"Use a machine with an NVIDIA GPU, or {_ON_CPU}.",
    "cudaErrorInsufficientDriver": f"Install an NVIDIA driver that is as new as CUDA 13, or {_ON_CPU}.",
    "cudaErrorInvalidDevice": "Name a device that is there: cuda:0 is the first one.",
}
# Statuses after which CUDA's documentation says that the process must be started again; and memory or links that have
# failed (214, 220), a context that is gone (709), an unknown failure (999).
_LOST = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999})
_START_AGAIN = "Start the process again; lines with Xid in the driver's log (dmesg) give the cause."
_ANY_FAULT = "See the message; if it comes again, run with CUDA_LAUNCH_BLOCKING=1 to find the step it belongs to."


def load_cuda() -> Any:
    """Returns the module `cuda.bindings.runtime`."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as fault:
        todo = f"Run: {install_command('tensorrt')} or pip install cuda-python."
        raise RuntimeFault("CUDA", str(fault), "the package cuda-python", todo) from fault


@functools.cache
def open_device(ordinal: int = 0) -> Device:
    """Returns the one object of the device of that number. Raises RuntimeFault: no cuda-python, driver or such GPU."""
    return Device(load_cuda(), ordinal)


def ordinal_from_name(name: str) -> int:
    """Returns 0 for `cuda`, N for `cuda:N`."""
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise RuntimeFault("engine.device", repr(name), "cuda or cuda:N", "TensorRT runs on NVIDIA GPUs only.")
    return int(number or "0")


class Memory:
    """Bytes at an address, freed when nothing refers to this object any more."""

    def __init__(self, address: int, num_bytes: int, free: Callable[[int], object], owner: Any = None) -> None:
        self.address, self.num_bytes = address, num_bytes
        weakref.finalize(self if owner is None else owner, free, address)

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.num_bytes


class PinnedMemory(Memory):
    """Host memory that the GPU reads and writes directly; `bytes` and all views of it keep it alive."""

    def __init__(self, address: int, num_bytes: int, free: Callable[[int], object]) -> None:
        buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
        super().__init__(address, num_bytes, free, buffer)
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array(buffer)


class Graph:
    """A captured sequence of copies and kernels."""

    def __init__(self, device: Device, handle: Any) -> None:
        self.device, self.handle = device, handle
        weakref.finalize(self, device.release, device.api.cudaGraphExecDestroy, handle)

    def launch(self) -> None:
        self.device.call("cudaGraphLaunch", self.handle, self.device.stream)


class Device:
    """One GPU."""

    def __init__(self, api: Any, ordinal: int = 0) -> None:
        self.api, self.ordinal = api, ordinal
        self._lost: DeviceLost | None = None
        self._is_running = False  # a step, which a library may be capturing
        self._unused: list[tuple[Callable[[Any], Any], Any]] = []  # to be freed after it
        count = self.call("cudaGetDeviceCount")
        if ordinal >= count:
            got, expected = f"device {ordinal}", f"a number below {count}"
            raise RuntimeFault(f"cuda:{ordinal}", got, expected, _TODO["cudaErrorInvalidDevice"])
        self.activate()
        # Work on the legacy default stream would make TensorRT wait after every step, and cannot be captured.
        self.stream = int(self.call("cudaStreamCreateWithFlags", api.cudaStreamNonBlocking))

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls a function of the API; returns its result without the status.

        Raises:
            DeviceLost: no later call can succeed. It is raised from then on, without a call.
        """
        results = self._call(function, *arguments)
        return results[0] if results else None

    def _call(self, function: str, *arguments: Any) -> list[Any]:
        if (lost := self._lost) is not None:
            raise DeviceLost(lost.where, lost.got, lost.expected, lost.todo)
        status, *results = getattr(self.api, function)(*arguments)
        if int(status) != 0:
            self._fail(function, status)
        return results

    def _fail(self, function: str, status: Any) -> NoReturn:
        name = self.api.cudaGetErrorName(status)[1].decode()
        text = self.api.cudaGetErrorString(status)[1].decode()
        where, got = f"cuda:{self.ordinal}, {function}", f"{name}: {text}"
        if int(status) in _LOST:
            self._lost = DeviceLost(where, got, "success", _START_AGAIN)
            raise self._lost
        raise RuntimeFault(where, got, "success", _TODO.get(name, _ANY_FAULT))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Runs a step, or a load; asks the device after an error of a library that may not tell why it failed."""
        self._is_running = True
        try:
            yield
        except (SpecCompileError, RuntimeError):
            if self._lost is None:
                status, *_ = self.api.cudaStreamSynchronize(self.stream)
                if int(status) in _LOST:
                    self._fail("cudaStreamSynchronize", status)
            raise
        finally:
            self._is_running = False
            while self._unused:
                free, handle = self._unused.pop()
                free(handle)

    def release(self, free: Callable[[Any], Any], handle: Any) -> None:
        """Frees what nothing refers to any more, during a step only after it: it may happen inside a capture."""
        if self._is_running:
            self._unused.append((free, handle))
        else:
            free(handle)

    def activate(self) -> None:
        self.call("cudaSetDevice", self.ordinal)

    def properties(self) -> dict[str, Any]:
        """Returns {"name", "compute_capability": [major, minor], "total_bytes", "free_bytes", "driver", "runtime"}."""
        self.activate()
        held = self.call("cudaGetDeviceProperties", self.ordinal)
        free_bytes, total_bytes = self.memory_bytes()
        return {
            "name": held.name.decode().rstrip("\0") if isinstance(held.name, bytes) else str(held.name),
            "compute_capability": [int(held.major), int(held.minor)],
            "total_bytes": total_bytes,
            "free_bytes": free_bytes,
            "driver": int(self.call("cudaDriverGetVersion")),
            "runtime": int(self.call("cudaRuntimeGetVersion")),
        }

    def memory_bytes(self) -> tuple[int, int]:
        """Returns free and total bytes of the device."""
        free_bytes, total_bytes = self._call("cudaMemGetInfo")
        return int(free_bytes), int(total_bytes)

    def allocate(self, num_bytes: int) -> Memory:
        """Allocate device memory; its contents are undefined."""
        num_bytes = max(num_bytes, ALIGNMENT)
        free = functools.partial(self.release, self.api.cudaFree)
        return Memory(int(self.call("cudaMalloc", num_bytes)), num_bytes, free)

    def allocate_zeroed(self, num_bytes: int) -> Memory:
        memory = self.allocate(num_bytes)
        self.call("cudaMemsetAsync", memory.address, 0, memory.num_bytes, self.stream)
        return memory

    def allocate_pinned(self, num_bytes: int) -> PinnedMemory:
        """Allocate zeroed pinned host memory."""
        num_bytes = max(num_bytes, ALIGNMENT)
        free = functools.partial(self.release, self.api.cudaFreeHost)
        memory = PinnedMemory(int(self.call("cudaMallocHost", num_bytes)), num_bytes, free)
        memory.bytes[:] = 0
        return memory

    def clear(self, address: int, num_bytes: int) -> None:
        self.call("cudaMemsetAsync", address, 0, num_bytes, self.stream)

    def copy(self, dest: int, source: int, num_bytes: int) -> None:
        """Copy on the stream between any two addresses; returns at once where both are pinned or on the device."""
        kind = self.api.cudaMemcpyKind.cudaMemcpyDefault
        self.call("cudaMemcpyAsync", dest, source, num_bytes, kind, self.stream)

    def copy_rows(
        self, dest: int, dest_pitch: int, source: int, source_pitch: int, row_bytes: int, num_rows: int
    ) -> None:
        """Copy rows that are `pitch` bytes apart; source and destination must not overlap."""
        kind = self.api.cudaMemcpyKind.cudaMemcpyDefault
        self.call("cudaMemcpy2DAsync", dest, dest_pitch, source, source_pitch, row_bytes, num_rows, kind, self.stream)

    def synchronize(self) -> None:
        self.call("cudaStreamSynchronize", self.stream)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` enqueues on the stream, without running it."""
        # Relaxed: TensorRT may touch other streams and allocate while it enqueues.
        self.call("cudaStreamBeginCapture", self.stream, self.api.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
        is_whole = False
        try:
            work()
            is_whole = True
        finally:  # the stream must leave capture mode, even after an exception
            status, graph = self.api.cudaStreamEndCapture(self.stream)
            if int(status) == 0 and not is_whole:
                self.api.cudaGraphDestroy(graph)
        if int(status) != 0:
            self._fail("cudaStreamEndCapture", status)
        try:
            return Graph(self, self.call("cudaGraphInstantiate", graph, 0))
        finally:
            self.api.cudaGraphDestroy(graph)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
