# SPDX-License-Identifier: Apache-2.0
"""The arguments of calls to the CUDA driver, recorded by a fake driver."""

import ctypes
import types

import pytest

from speccompile.backends.tensorrt import kernels
from speccompile.backends.tensorrt.launches import KVRollbackArgs, SpecVerifyArgs
from speccompile.backends.tensorrt.plugin_names import KV_ROLLBACK, SPEC_VERIFY
from speccompile.errors import RuntimeFault


class Driver(types.SimpleNamespace):
    """Keeps the launches; arguments are read as the driver does, at the call."""

    CUfunction = int
    status = 0

    def __init__(self, struct: type[ctypes.Structure]) -> None:
        super().__init__(struct=struct, launches=[], names=[])

    def cuLibraryLoadData(self, *arguments):  # type: ignore[no-untyped-def]
        assert arguments[0] == b"code" and len(arguments) == 7
        return self.status, 7

    def cuLibraryGetKernel(self, library: int, name: bytes):  # type: ignore[no-untyped-def]
        self.names.append(name.decode())
        return 0, len(self.names)

    def cuGetErrorName(self, status: int):  # type: ignore[no-untyped-def]
        return 0, b"CUDA_ERROR_NO_BINARY_FOR_GPU"

    def cuLaunchKernel(self, function, x, y, z, bx, by, bz, shared, stream, parameters, extra):  # type: ignore[no-untyped-def]
        (address,) = (ctypes.c_void_p * 1).from_address(parameters)
        args = self.struct.from_buffer_copy(self.struct.from_address(address))
        self.launches.append((self.names[function - 1], (x, y, z), (bx, by, bz), shared, stream, args))
        return (0,)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def set_up(struct: type[ctypes.Structure], op: str) -> Driver:
        driver = Driver(struct)
        monkeypatch.setattr(kernels.importlib, "import_module", lambda name: driver)
        module = kernels.KernelModule(b"code")
        monkeypatch.setattr(kernels, "current_capability", lambda: (9, 0))
        monkeypatch.setattr(kernels, "load_module", lambda asked, capability: {op: module}[asked])
        return driver

    return set_up


def test_spec_verify_is_two_launches(launched):  # type: ignore[no-untyped-def]
    driver = launched(SpecVerifyArgs, SPEC_VERIFY)
    args = SpecVerifyArgs(logits=1 << 40, next_token=99, batch=8, nodes=8, vocab=128256, draft_vocab=1, dtype=1)
    for _ in range(2):
        kernels.launch_verify(args, 30)
    assert driver.names == ["spec_verify_scan_f16", "spec_verify_resolve"]  # looked up once
    assert [launch[0] for launch in driver.launches] == driver.names * 2
    _, grid, block, shared, stream, seen = driver.launches[1]
    assert (grid, block, shared, stream) == ((64, 1, 1), (512, 1, 1), 501 * 12, 30)
    assert (seen.logits, seen.next_token, seen.vocab, seen.dtype) == (1 << 40, 99, 128256, 1)


def test_kv_rollback_is_one_launch_for_480_caches(launched):  # type: ignore[no-untyped-def]
    driver = launched(KVRollbackArgs, KV_ROLLBACK)
    caches = [4096 * (i + 1) for i in range(481)]
    kernels.launch_rollback(caches, (5, 8, 2048, 128), "bfloat16", 16, 32, 9, 30)
    (_, grid, block, shared, stream, first), (_, last_grid, *_, last) = driver.launches
    assert driver.names == ["kv_rollback_16"]
    assert (grid, last_grid, block, shared, stream) == ((1, 5, 480), (1, 5, 1), (128, 1, 1), 0, 30)
    assert list(first.caches) == caches[:480] and last.caches[0] == caches[480]
    assert (first.lengths, first.path, first.depth) == (16, 32, 9)
    assert (first.kv_heads, first.max_seq, first.row_vectors) == (8, 2048, 16)


def test_a_failing_driver_is_reported(monkeypatch):
    driver = Driver(SpecVerifyArgs)
    driver.status = 209
    monkeypatch.setattr(kernels.importlib, "import_module", lambda name: driver)
    with pytest.raises(
        RuntimeFault, match="plugins, cuLibraryLoadData: got CUDA_ERROR_NO_BINARY_FOR_GPU; expected success"
    ):
        kernels.KernelModule(b"code")


def test_copies_go_on_the_stream(monkeypatch):
    calls: list[tuple[int, ...]] = []
    driver = types.SimpleNamespace(cuMemcpyDtoDAsync=lambda *given: (calls.append(given), (0,))[1])
    monkeypatch.setattr(kernels.importlib, "import_module", lambda name: driver)
    kernels.copy_memory(64, 32, 16, 7)
    assert calls == [(64, 32, 16, 7)]
    driver.cuMemcpyDtoDAsync = lambda *given: (700,)
    driver.cuGetErrorName = lambda status: (0, b"CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(RuntimeFault, match="cuMemcpyDtoDAsync: got CUDA_ERROR_ILLEGAL_ADDRESS"):
        kernels.copy_memory(64, 32, 16, 7)
