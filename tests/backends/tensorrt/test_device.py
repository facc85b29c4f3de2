# SPDX-License-Identifier: Apache-2.0
"""The device turns every status into a fault with advice; memory and graphs live as long as they are used."""

import contextlib
import gc
import sys
from functools import partial

import numpy as np
import pytest

from speccompile.backends.cuda import device as device_module
from speccompile.backends.cuda.arrays import DeviceArray, host_dtype, item_bytes
from speccompile.backends.cuda.device import Device, open_device, ordinal_from_name
from speccompile.core.protocols import DeviceLost
from speccompile.errors import RuntimeFault
from tests.backends.tensorrt.fake_cuda import FailingCuda, FakeCuda, Status


@pytest.fixture
def cuda():
    return FakeCuda()


@pytest.fixture
def device(cuda):
    return Device(cuda)


def test_names_of_devices():
    assert [ordinal_from_name(name) for name in ("cuda", "cuda:0", "cuda:3")] == [0, 0, 3]
    for name in ("cpu", "cuda:x", "gpu"):
        with pytest.raises(RuntimeFault, match=rf"engine\.device: got '{name}'; expected cuda or cuda:N"):
            ordinal_from_name(name)


def test_a_machine_without_a_gpu_says_so():
    with pytest.raises(RuntimeFault, match=r"cudaErrorNoDevice.*engine\.device: cpu"):
        Device(FakeCuda(num_devices=0))
    with pytest.raises(RuntimeFault, match=r"device 2; expected a number below 1"):
        Device(FakeCuda(), 2)


def test_the_real_bindings_say_so_as_well():
    """cuda-python's own module, where it is installed and there is no driver: the status that users will see."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    if int(runtime.cudaGetDeviceCount()[0]) == 0:
        pytest.skip("this machine has a GPU")
    open_device.cache_clear()
    with pytest.raises(RuntimeFault, match=r"cudaGetDeviceCount: got cudaError\w+: .*driver|cudaErrorNoDevice"):
        open_device(0)


def test_the_real_bindings_have_every_function_that_is_called(cuda):
    runtime = pytest.importorskip("cuda.bindings.runtime")
    names = {name for name in vars(FakeCuda) if name.startswith("cuda")}
    assert len(names) > 20
    assert {name for name in names if not hasattr(runtime, name)} == set()


class BesideTheReal:
    """A fake whose every call goes to the real bindings first, which convert the arguments and find no driver."""

    def __init__(self, runtime):
        self._runtime, self._fake, self.called = runtime, FakeCuda(), set()

    def __getattr__(self, name):
        real, fake = getattr(self._runtime, name), getattr(self._fake, name)
        if not callable(fake):
            return real  # constants and enumerations are the bindings' own

        def call(*arguments):
            # Arguments of another kind or number raise TypeError here. A fake graph stands for the number of a handle.
            real(*(argument if hasattr(argument, "__index__") else id(argument) for argument in arguments))
            self.called.add(name)
            return fake(*arguments)

        return call


def test_the_real_bindings_take_the_arguments_of_every_call():
    runtime = pytest.importorskip("cuda.bindings.runtime")
    if int(runtime.cudaGetDeviceCount()[0]) == 0:
        pytest.skip("this machine has a GPU, where these addresses would be real")
    api = BesideTheReal(runtime)
    device = Device(api)
    device.properties()
    memory, pinned = device.allocate_zeroed(1024), device.allocate_pinned(1024)
    device.clear(memory.address, 64)
    device.copy(pinned.address, memory.address, 64)
    device.copy_rows(memory.address, 128, memory.address + 512, 64, 32, 2)
    device.synchronize()
    address = memory.address
    device.capture(partial(device.clear, address, 64)).launch()
    with pytest.raises(RuntimeFault, match="cudaErrorMemoryAllocation"):
        device.allocate(1 << 50)
    api.cudaGetLastError()
    memory = pinned = None
    gc.collect()
    names = {name for name in vars(FakeCuda) if name.startswith("cuda") and callable(getattr(FakeCuda, name))}
    assert names - api.called == set()


LOST = [status for status in Status if 200 < status < 900 or status in (911, 999)]


@pytest.mark.parametrize("status", LOST)
def test_a_device_that_is_lost_is_not_called_again(status):
    cuda = FailingCuda(("cudaMemsetAsync", 1), status, lasts=False)
    device = Device(cuda)
    memory = device.allocate_zeroed(64)
    with pytest.raises(DeviceLost, match=rf"cuda:0, cudaMemsetAsync: got {status.name}: .*Start the process again"):
        device.clear(memory.address, 64)
    calls = cuda.calls.copy()
    for call in (device.synchronize, device.activate, device.memory_bytes, lambda: device.allocate(1)):
        with pytest.raises(DeviceLost, match=status.name):
            call()
    assert cuda.calls == calls


def test_every_status_that_asks_for_a_new_process_loses_the_device():
    """By the documentation that the real bindings carry."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    asks = {int(s) for s in runtime.cudaError_t if "terminated and relaunched" in " ".join((s.__doc__ or "").split())}
    assert len(asks) > 10 and asks <= set(map(int, LOST))


@pytest.mark.parametrize("status", [Status.cudaErrorInvalidValue, Status.cudaErrorMemoryAllocation])
def test_a_device_goes_on_after_other_faults(status):
    device = Device(FailingCuda(("cudaMemsetAsync", 0), status, lasts=False))
    with pytest.raises(RuntimeFault, match=status.name) as caught:
        device.allocate_zeroed(64)
    assert not isinstance(caught.value, DeviceLost)
    device.allocate_zeroed(64)
    device.synchronize()


def test_nothing_is_freed_during_a_step(cuda, device):
    """A garbage collection inside a library's capture would make it void."""
    kept, gone, pinned = device.allocate(64), device.allocate(64), device.allocate_pinned(64)
    with device.watched():
        del gone, pinned
        assert len(cuda.device) == 2 and len(cuda.pinned) == 1
    assert set(cuda.device) == {kept.address} and not cuda.pinned
    held = [kept]
    del kept
    with contextlib.suppress(RuntimeFault), device.watched():
        held.clear()
        assert len(cuda.device) == 1
        raise RuntimeFault("engine", "a fault", "none", "Try again.")
    assert not cuda.device


@pytest.mark.parametrize("fails_at", ["cudaGraphInstantiate", None])
def test_a_capture_that_fails_leaves_no_graph(fails_at):
    cuda = FailingCuda(fails_at and (fails_at, 0), Status.cudaErrorMemoryAllocation, lasts=False)
    device = Device(cuda)
    memory = device.allocate_zeroed(64)

    def work():
        device.clear(memory.address, 64)
        if fails_at is None:
            raise RuntimeError("a library that fails")

    with pytest.raises((RuntimeFault, RuntimeError), match=r"cudaErrorMemoryAllocation|a library"):
        device.capture(work)
    assert cuda.captured is None and cuda.calls["cudaGraphDestroy"] == 1
    device.synchronize()


def test_cuda_python_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(RuntimeFault, match=r"CUDA: got .*cuda-python.*pip install"):
        device_module.load_cuda()


def test_memory_is_freed_with_its_last_user(cuda, device):
    memory = device.allocate(1000)
    pinned = device.allocate_pinned(1000)
    assert memory.address in cuda.device and pinned.address in cuda.pinned
    assert pinned.bytes.sum() == 0 and memory.holds(memory.address + 999) and not memory.holds(memory.address + 1000)
    array = DeviceArray(device, memory.address, (2, 3), "float32", memory)
    address = memory.address
    del memory, pinned
    assert address in cuda.device and not cuda.pinned
    del array
    assert not cuda.device


def test_views_of_pinned_memory_keep_it(cuda, device):
    pinned = device.allocate_pinned(64)
    view = pinned.bytes[8:16].view(np.int64).reshape(1, 1)
    del pinned
    assert cuda.pinned
    del view
    assert not cuda.pinned


def test_fresh_memory_is_garbage_and_zeroed_memory_is_not(device):
    garbage, zeroed = device.allocate(64), device.allocate_zeroed(64)
    assert np.isnan(np.asarray(DeviceArray(device, garbage.address, (4,), "float32"))).all()
    assert (np.asarray(DeviceArray(device, zeroed.address, (4,), "float32")) == 0).all()


def test_device_arrays_of_any_dtype_reach_the_host(device):
    pinned, memory = device.allocate_pinned(8), device.allocate(8)
    pinned.bytes[:8] = np.array([1.5, -2.0, 0.25, 3.0], host_dtype("bfloat16")).view(np.uint8)
    device.copy(memory.address, pinned.address, 8)
    array = DeviceArray(device, memory.address, (2, 2), "bfloat16")
    assert np.asarray(array, np.float32).tolist() == [[1.5, -2.0], [0.25, 3.0]]
    assert np.asarray(array).dtype.name == "bfloat16" and item_bytes("bfloat16") == 2 and array.nbytes == 8
    assert repr(array).startswith("DeviceArray(bfloat16[2, 2] at 0x")


def test_rows_are_copied_with_their_pitches(device):
    pinned, memory = device.allocate_pinned(64), device.allocate_zeroed(64)
    pinned.bytes[:12] = np.arange(12)
    device.copy_rows(memory.address, 8, pinned.address, 4, 4, 3)
    got = np.asarray(DeviceArray(device, memory.address, (3, 8), "int8"))
    assert got[:, :4].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] and not got[:, 4:].any()


def test_a_capture_ends_however_its_work_ends(cuda, device):
    memory = device.allocate_zeroed(8)

    def broken():
        raise RuntimeFault("a", "b", "c", "d")

    with pytest.raises(RuntimeFault, match="a: got b"):
        device.capture(broken)
    assert cuda.captured is None
    graph = device.capture(lambda: device.call("cudaMemsetAsync", memory.address, 7, 8, device.stream))
    device.synchronize()
    array = DeviceArray(device, memory.address, (8,), "int8")
    assert not np.asarray(array).any()
    graph.launch()
    assert (np.asarray(array) == 7).all()
    cuda.can_capture = False
    with pytest.raises(RuntimeFault, match="cudaErrorStreamCaptureUnsupported"):
        device.capture(lambda: None)


def test_properties_are_json_ready(device):
    assert device.properties() == {
        "name": "Fake GPU",
        "compute_capability": [9, 0],
        "total_bytes": 1 << 30,
        "free_bytes": 1 << 30,
        "driver": 13000,
        "runtime": 13000,
    }
