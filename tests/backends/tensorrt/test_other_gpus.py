# SPDX-License-Identifier: Apache-2.0
"""Plans for other GPUs than this machine's: built, recorded as not run, refused at load with the reason."""

import pytest

from speccompile.backends.base import LoadJob
from speccompile.backends.cuda import device
from speccompile.backends.tensorrt import backend, import_helper, records
from speccompile.backends.tensorrt.variants import VARIANTS
from speccompile.errors import BundleError, RuntimeFault
from tests.backends.tensorrt.fake_cuda import FakeCuda
from tests.backends.tensorrt.fake_trt import FakeTrt

EVERY = "7.5, 8.0, 8.6, 8.9, 12.0, 12.1"
CASES = [  # variant, capabilities named at the build, GPUs of the machine, ordinal, what the plan was built for
    ("tensorrt_rtx", ["12.0"], [(8, 9)], 0, "12.0"),
    ("tensorrt_rtx", ["8.6", "8.9"], [(8, 9)], 0, None),
    ("tensorrt_rtx", [], [(8, 9)], 0, None),
    ("tensorrt_rtx", [], [(9, 0)], 0, EVERY),  # an H100: it is none of TensorRT-RTX's
    ("tensorrt_rtx", [], [(10, 0), (12, 0)], 0, EVERY),  # whatever the second GPU is
    ("tensorrt_rtx", ["12.0"], [(8, 9), (12, 0)], 0, "12.0"),
    ("tensorrt_rtx", ["12.0"], [(8, 9), (12, 0)], 1, None),
    ("tensorrt_rtx", ["12.0"], [], 0, None),  # no GPU: that is said first
    ("tensorrt", [], [(9, 0)], 0, None),  # full TensorRT builds for the GPU at hand
    ("tensorrt", ["9.0"], [(9, 0)], 0, None),
    ("tensorrt", ["9.0"], [(8, 9)], 0, "9.0"),
]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """(variant, named, GPUs) -> a plan with its record."""

    def make(variant, named, gpus):
        loaded = FakeTrt(FakeCuda(), variant).variant
        monkeypatch.setattr(import_helper, "find_compute_capabilities", lambda: tuple(gpus))
        monkeypatch.setattr(import_helper, "load_tensorrt", lambda name: loaded)
        monkeypatch.setattr(device, "open_device", lambda ordinal=0: None)
        plan = tmp_path / "graph.plan"
        plan.write_bytes(b"plan")
        record = {"variant": variant, "version": "0.0", "plugins": [], "plugin_abi": None, "plan_bytes": 4}
        profiles = [{"sizes": {"batch": [1, 1, 1], "nodes": [1, 4, 4], "scored": [1, 4, 4]}}]
        sizes = {"compute_capabilities": named, "profiles": profiles, "platform": records.machine_name()}
        records.write_record(plan, {**record, **sizes})
        return plan

    return make


@pytest.mark.parametrize(("variant", "named", "gpus", "ordinal", "built_for"), CASES)
def test_a_plan_for_other_gpus_is_not_run(machine, variant, named, gpus, ordinal, built_for):
    plan, maker = machine(variant, named, gpus), backend.TensorRTBackend()
    record = records.read_record(plan)
    if built_for is None:
        records.check_record(plan, record, 1, ordinal)
    else:
        capability = "{}.{}".format(*gpus[ordinal])
        expected = rf"a GPU of compute capability {capability}; expected one of {built_for}"
        with pytest.raises(BundleError, match=expected) as caught:
            records.check_record(plan, record, 1, ordinal)
        is_able = gpus[ordinal] in VARIANTS[variant].target_capabilities
        other = "compute_capabilities" if is_able else "engine.variant: tensorrt on"
        assert ("again on this GPU" if variant == "tensorrt" else other) in caught.value.todo
    if ordinal == 0:
        why = maker.why_unchecked(plan)
        if built_for is not None:
            assert why == f"built for other GPUs: {built_for}; not run on this one of {capability}"
            assert maker.tune(LoadJob(plan, None)) == {"measured": False, "why": why}
            adapted = maker.adapt_tuning(LoadJob(plan, None, tuning={"measured": False}, others_bytes=7))
            assert adapted == {"measured": False, "others_bytes": 7}
        else:
            assert (why is None) == bool(gpus)


def test_a_gpu_that_cannot_be_used_ends_no_build(machine, monkeypatch):
    """As with a driver older than CUDA 13: the plan is there, and what is in the way is said."""

    def refuse(ordinal=0):
        raise RuntimeFault("cuda:0", "cudaErrorInsufficientDriver: too old", "success", "Update it.")

    plan, maker = machine("tensorrt_rtx", [], [(8, 9)]), backend.TensorRTBackend()
    monkeypatch.setattr(device, "open_device", refuse)
    why = "cudaErrorInsufficientDriver: too old: built, not run"
    assert maker.tune(LoadJob(plan, None)) == {"measured": False, "why": why}


def test_a_plan_of_full_tensorrt_is_for_the_gpu_that_built_it(monkeypatch):
    monkeypatch.setattr(import_helper, "find_compute_capabilities", lambda: ((9, 0), (8, 9)))
    assert [records._own_capability(VARIANTS[name]) for name in ("tensorrt", "tensorrt_rtx")] == [["9.0"], []]
