# SPDX-License-Identifier: Apache-2.0
"""What gpu-check demands of the kernels, tried on their build for the CPU."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from bench.gpu_check import kernels
from speccompile.ops.spec_verify import spec_verify
from tests.plugins import host_lab

pytestmark = pytest.mark.export


def _cases():  # type: ignore[no-untyped-def]
    return kernels.check_cases(vocabs=(500,), batches=(2,))


def _on_cpu(case: kernels.Case, dtype: str):  # type: ignore[no-untyped-def]
    kind = host_lab.NUMPY_DTYPES[dtype]
    return host_lab.verify(host_lab.kernels(), {**case, "logits": case["logits"].astype(kind)})


def test_the_kernels_pass_the_check():
    (row,) = kernels.check_verify(_on_cpu, _cases())
    assert row["ok"] is True, row
    assert row["got"].startswith("16 of 16 equal")


def test_a_wrong_kernel_does_not():
    def wrong(case: kernels.Case, dtype: str):  # type: ignore[no-untyped-def]
        path, num_accepted, next_token = _on_cpu(case, dtype)
        return path, num_accepted, next_token + 1

    (row,) = kernels.check_verify(wrong, _cases())
    assert row["ok"] is False and "vocab 500, batch 2" in row["got"]


def test_nothing_checked_is_not_a_pass():
    assert kernels.check_verify(_on_cpu, iter(()))[0]["ok"] is False


def test_the_cases_accept_refuse_and_hold_in_every_dtype():
    kept = [spec_verify(**case)[1] for _, case in _cases()]
    assert max(k.max() for k in kept) >= 3 and min(k.min() for k in kept) == 0
    for _, case in _cases():
        for kind in (np.float16, ml_dtypes.bfloat16):
            np.testing.assert_array_equal(case["logits"].astype(kind).astype(np.float32), case["logits"])
        bits = kernels.bits_from_floats(case["logits"], "bfloat16")
        np.testing.assert_array_equal(bits.view(ml_dtypes.bfloat16).astype(np.float32), case["logits"])


class Recorder:
    """A device that notes in which order things are put on its stream."""

    stream = 7

    def __init__(self) -> None:
        self.put: list[str] = []
        self._events = iter(("start", "end"))

    def capture(self, work):  # type: ignore[no-untyped-def]
        work()
        return SimpleNamespace(launch=lambda: self.put.append("graph"))

    def call(self, name: str, *arguments: object) -> object:
        if name == "cudaEventRecord":
            self.put.append(f"event {arguments[0]}")
        return next(self._events) if name == "cudaEventCreate" else 40.0

    def synchronize(self) -> None:
        self.put.append("wait")


def test_the_gpu_is_busy_when_the_time_starts():
    """Or the time of the CPU to launch the graph would count."""
    device = Recorder()
    assert kernels.Bench(device).time_ms([lambda: None]) == 40.0 / kernels.LAUNCHES  # type: ignore[arg-type]
    assert device.put[1:6] == ["graph", "event start", "graph", "event end", "wait"]


def test_small_copies_are_cold(monkeypatch):
    """Each of a graph's copies reads bytes that no other reads, and writes likewise, as long as there are any."""

    class Copier(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.copies: list[tuple[int, int, int]] = []

        def allocate(self, num_bytes: int) -> SimpleNamespace:
            return SimpleNamespace(address=0x1000 + 0x100000 * len(self.copies), num_bytes=num_bytes)

        def copy(self, dest: int, source: int, num_bytes: int) -> None:
            self.copies.append((dest, source, num_bytes))

    monkeypatch.setattr(kernels, "COLD_BYTES", 1000)
    monkeypatch.setattr(kernels, "LAUNCHES", 5)
    device = Copier()
    bench = kernels.Bench(device)  # type: ignore[arg-type]
    assert kernels.measure_copy(bench, 300) == pytest.approx(2 * 300 / (40.0 / 5) / 1e6)
    in_graph = device.copies[1:]  # the first warms up
    assert [source - 0x1000 for _, source, _ in in_graph] == [0, 300, 600, 0, 300]
    assert all(dest == source and size == 300 for dest, source, size in in_graph)
    device = Copier()
    kernels.measure_copy(kernels.Bench(device), 1000)  # type: ignore[arg-type]
    assert {size for *_, size in device.copies} == {1000}


@pytest.mark.parametrize(("nodes", "expected"), [(1, [0]), (7, [0, 0, 0, 1, 1, 2, 2])])
def test_trees(nodes, expected):
    assert [max(p, 0) for p in kernels.tree_parents(nodes, is_chain=False)] == expected
