# SPDX-License-Identifier: Apache-2.0
"""What a dry run compares with the machine, and the time that it gives."""

import ctypes
import shutil
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest

from speccompile.backends import machine
from speccompile.recipe import predict

GIB = 2**30
TOTAL = {"build_peak_bytes": 40 * GIB, "runtime_bytes": 8 * GIB, "bundle_bytes": 3 * GIB}


def make_plan(device: str = "cpu", backend: str = "onnxruntime") -> Any:
    return SimpleNamespace(engine=SimpleNamespace(device=device, backend=backend))


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(predict, "available_memory", lambda: 12 * GIB)
    monkeypatch.setattr(predict, "gpu_memory", lambda: 80 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(5 * GIB))


@pytest.mark.parametrize(("device", "home", "free"), [("cpu", "memory", 12), ("cuda", "the GPU's memory", 80)])
def test_needs_stand_beside_what_is_there(device, home, free, tmp_path):
    disks = {"the bundle": tmp_path / "not/yet/there", "the cache": tmp_path}
    building, decoding, disk = predict.compare(make_plan(device), {"total": TOTAL}, disks)
    assert (building["where"], building["needed_bytes"], building["free_bytes"]) == ("memory", 40 * GIB, 12 * GIB)
    assert (decoding["where"], decoding["needed_bytes"], decoding["free_bytes"]) == (home, 8 * GIB, free * GIB)
    # Both are on one disk, which must hold both.
    assert disk["what"] == "the bundle and the cache" and disk["where"] == f"the disk of {tmp_path}"
    assert (disk["needed_bytes"], disk["free_bytes"]) == (6 * GIB, 5 * GIB)


def test_what_is_not_known_is_none(monkeypatch):
    monkeypatch.setattr(predict, "available_memory", lambda: 0)
    monkeypatch.setattr(predict, "gpu_memory", lambda: None)
    rows = predict.compare(make_plan("cuda"), {"total": TOTAL}, {})
    assert [row["free_bytes"] for row in rows] == [None, None]


def test_time_grows_with_the_weights_and_is_not_given_for_other_backends():
    def seconds(num_params: int, backend: str = "onnxruntime") -> tuple[int, int] | None:
        graphs = {"target": {"num_params": num_params}, "draft": {"num_params": num_params}}
        return predict.build_seconds(make_plan(backend=backend), {"graphs": graphs})

    assert seconds(GIB // 8) == (20 + 45, 120 + 430)
    assert seconds(GIB) == (20 + 8 * 45, 120 + 8 * 430)
    assert seconds(GIB, "tensorrt") is None


@pytest.mark.parametrize(
    ("limit", "current", "expected"),
    [("max", "5", None), (str(3 * GIB), str(2 * GIB), GIB + 100), (str(GIB), str(2 * GIB), 0)],
)
def test_a_container_has_what_its_limit_leaves(limit, current, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "none")
    whole = machine.available_memory()
    assert whole > 3 * GIB // 2
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    for name, text in (("max", limit), ("current", current), ("stat", "anon 7\ninactive_file 100")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    found = machine.available_memory()
    assert found == expected if expected is not None else abs(found - whole) < GIB


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert machine.gpu_memory() is None
    driver = SimpleNamespace(cuInit=lambda flags: 0, cuDeviceTotalMem_v2=_tell)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert machine.gpu_memory() == 80 * GIB


def _tell(size: Any, ordinal: int) -> int:
    size._obj.value = 80 * GIB
    return 0
