# SPDX-License-Identifier: Apache-2.0
"""Which GPUs and which ONNX Runtime `engine.device: cuda` takes, and what it says of others."""

import pytest

from speccompile.backends.base import LoadJob
from speccompile.backends.cuda.device import Device
from speccompile.backends.onnxruntime import cuda_backend, cuda_session
from speccompile.backends.onnxruntime.cuda_backend import OrtCudaBackend
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CompileOptions
from speccompile.errors import BuildError, BundleError, RuntimeFault
from speccompile.graph_kinds.decoder import decoder_spec, verified_spec
from tests.backends.tensorrt.fake_cuda import FakeCuda

GPUS = [((7, 5), True), ((8, 9), True), ((9, 0), True), ((12, 0), True), ((10, 0), False), ((10, 3), False)]
GPUS += [((11, 0), False), ((12, 1), False), ((7, 0), False)]


SPEC = verified_spec(decoder_spec("target", ModelDims("llama", 97, 64, 2, 4, 2, 16, 64)))


@pytest.mark.parametrize(("capability", "is_known"), GPUS)
def test_a_gpu_without_kernels_of_onnxruntime_is_refused_at_load(tmp_path, capability, is_known):
    cuda = FakeCuda()
    cuda.capability = capability
    path, device = tmp_path / "graph.onnx", Device(cuda)
    if is_known:
        with pytest.raises(BundleError, match=r"graph\.onnx"):  # it goes on, and finds no file
            cuda_session.open_plan(path, SPEC, device, {})
        assert cuda_session.find_missing_kernels(device) is None
        return
    got = "a GPU of compute capability {}.{}, for which onnxruntime-gpu has no kernels".format(*capability)
    with pytest.raises(BundleError, match=rf"got {got}; expected one of 7\.5, .*engine\.backend: tensorrt"):
        cuda_session.open_plan(path, SPEC, device, {})


@pytest.mark.parametrize(
    ("providers", "capability", "why"),
    [
        (["CUDAExecutionProvider", "CPUExecutionProvider"], (9, 0), None),
        (["CUDAExecutionProvider", "CPUExecutionProvider"], (10, 0), "a GPU of compute capability 10.0, for which"),
        (["AzureExecutionProvider", "CPUExecutionProvider"], (9, 0), "an onnxruntime without CUDA"),
        (None, (9, 0), "an onnxruntime without CUDA"),  # none is installed
    ],
)
def test_the_cpus_onnxruntime_on_a_gpu_machine_is_refused_before_the_export(monkeypatch, providers, capability, why):
    cuda = FakeCuda()
    cuda.capability = capability
    device = Device(cuda)
    monkeypatch.setattr("speccompile.backends.cuda.device.open_device", lambda ordinal: device)
    monkeypatch.setattr("speccompile.backends.cuda.device.load_cuda", lambda: cuda)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: providers)
    if providers is None:
        monkeypatch.setattr(cuda_backend, "find_spec", lambda name: None)
    backend = OrtCudaBackend()
    got = backend.why_unchecked()
    assert got is None if why is None else got.startswith(why) and got.endswith("not run")
    if why is not None and "without CUDA" in why:
        with pytest.raises(BuildError, match=r"engine\.device cuda: got an onnxruntime without CUDA.*ort-gpu"):
            backend.check(SPEC, CompileOptions("float32"), "none")
        assert backend.tune(LoadJob(None, SPEC)) == {"measured": False, "why": got}
    else:
        backend.check(SPEC, CompileOptions("float32"), "none")


@pytest.mark.parametrize(("fails", "why"), [("load_cuda", "no package cuda-python"), ("open_device", "no CUDA device")])
def test_graphs_are_lowered_without_a_gpu_or_its_package(monkeypatch, fails, why):
    def missing(*_):
        raise RuntimeFault("CUDA", "nothing", "something", "Install it.")

    monkeypatch.setattr("speccompile.backends.cuda.device.load_cuda", lambda: None)
    monkeypatch.setattr(cuda_backend, "gpu_memory", lambda: None)
    monkeypatch.setattr(f"speccompile.backends.cuda.device.{fails}", missing)
    assert OrtCudaBackend().why_unchecked().startswith(why)


def test_a_gpu_that_cannot_be_used_is_not_called_missing(monkeypatch):
    def refuse(ordinal):
        raise RuntimeFault("cuda:0", "cudaErrorInsufficientDriver: too old", "success", "Update it.")

    monkeypatch.setattr("speccompile.backends.cuda.device.load_cuda", lambda: None)
    monkeypatch.setattr("speccompile.backends.cuda.device.open_device", refuse)
    monkeypatch.setattr(cuda_backend, "gpu_memory", lambda: 8 << 30)
    assert OrtCudaBackend().why_unchecked() == "cudaErrorInsufficientDriver: too old: lowered, not run"


def test_a_bundle_of_another_machine_is_measured_once(monkeypatch, tmp_path):
    device, measured = Device(FakeCuda()), []
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("speccompile.backends.cuda.device.open_device", lambda ordinal: device)
    monkeypatch.setattr(OrtCudaBackend, "why_unchecked", lambda self, file=None: None)

    def tune(self, job):
        measured.append(job)
        return {"measured": True, "gpu": "Fake GPU", "step_ms": {"1": 2.0}}

    monkeypatch.setattr(OrtCudaBackend, "tune", tune)
    (tmp_path / "graph.onnx").write_bytes(b"graph")
    job = LoadJob(tmp_path / "graph.onnx", SPEC, tuning={"cuda_graphs": False})
    for _ in range(2):
        adapted = OrtCudaBackend().adapt_tuning(job)
        assert adapted == {"cuda_graphs": False, "measured": True, "gpu": "Fake GPU", "step_ms": {"1": 2.0}}
    assert len(measured) == 1
