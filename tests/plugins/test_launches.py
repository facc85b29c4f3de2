# SPDX-License-Identifier: Apache-2.0
"""Launches: their arithmetic is that of the headers, and a call passes enqueue and the real driver bindings."""

import ctypes
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from speccompile.backends.tensorrt import launches
from speccompile.backends.tensorrt.launches import KVRollbackArgs, SpecVerifyArgs, verify_launches
from speccompile.errors import RuntimeFault
from tests.plugins import host_lab

pytestmark = pytest.mark.plan


def test_argument_structs_are_those_of_the_kernels():
    kernels = host_lab.kernels()
    kernels.host_params_bytes.restype = ctypes.c_ulong
    assert kernels.host_params_bytes(0) == ctypes.sizeof(SpecVerifyArgs)
    assert kernels.host_params_bytes(1) == ctypes.sizeof(KVRollbackArgs) <= 4096
    for struct, header in ((SpecVerifyArgs, "spec_verify/layout.cuh"), (KVRollbackArgs, "kv_rollback/kernel.cuh")):
        text = (host_lab.PLUGINS / header).read_text()
        (body,) = re.findall(r"struct \w+Params \{(.*?)\n\};", text, re.DOTALL)
        names = re.findall(r"(\w+)(?:\[\w+\])?;", body)
        assert names == [name for name, *_ in struct._fields_]


@pytest.mark.parametrize(("batch", "nodes", "vocab"), [(1, 1, 1), (8, 8, 128256), (64, 16, 152064), (3, 5, 257)])
def test_workspace_bytes(batch, nodes, vocab):
    kernels = host_lab.kernels()
    kernels.host_workspace_bytes.restype = ctypes.c_ulonglong
    args = SpecVerifyArgs(workspace=1 << 20, batch=batch, nodes=nodes, vocab=vocab)
    bytes_in_header = kernels.host_workspace_bytes(ctypes.byref(args))
    assert bytes_in_header == launches.verify_workspace_bytes(batch, nodes, vocab, has_map=True)
    assert bytes_in_header - 4 * vocab == launches.verify_workspace_bytes(batch, nodes, vocab)


@pytest.mark.parametrize(("batch", "nodes", "vocab"), [(1, 1, 1), (8, 8, 128256), (700, 1, 3), (3, 5, 257)])
def test_the_plugin_library_does_the_same_arithmetic(batch, nodes, vocab):
    sizes = (ctypes.c_ulonglong * 4)()
    host_lab.kernels().host_verify_launches(*(ctypes.c_longlong(n) for n in (batch, nodes, vocab)), sizes)
    scan, flush = verify_launches(batch, nodes, vocab, "float16")
    with_map, without = (launches.verify_workspace_bytes(batch, nodes, vocab, flag) for flag in (True, False))
    assert list(sizes) == [with_map, without, scan.grid[0], flush.shared_bytes]
    for row_bytes, pointers in ((256, [4096, 16]), (256, [4096, 8]), (6, [64]), (12, [64])):
        unit = host_lab.kernels().host_rollback_unit(
            ctypes.c_longlong(row_bytes), (ctypes.c_void_p * len(pointers))(*pointers), len(pointers)
        )
        assert unit == launches.rollback_vector_bytes(row_bytes // 2, "float16", pointers)


def test_constants_are_those_of_the_headers():
    text = "".join(path.read_text() for path in sorted(host_lab.PLUGINS.rglob("*.cuh")))
    for name in (
        "CHUNK",
        "CHUNKS_IN_FLIGHT",
        "SCAN_THREADS",
        "RESOLVE_THREADS",
        "ROLLBACK_THREADS",
        "WARP",
        "MAX_NODES",
    ):
        assert str(getattr(launches, name)) in re.findall(rf"constexpr int {name} = (\d+);", text), name
    assert re.findall(r"constexpr int MAX_CACHES = (\d+);", text) == [str(launches.MAX_CACHES)]
    assert re.findall(r"constexpr int MAX_CHUNKS = (\d+);", text) == [str(launches.MAX_VOCAB // launches.CHUNK)]


def test_grids():
    scan, flush = verify_launches(8, 8, 128256, "float16")  # 501 chunks, 126 warps a row, 8 warps a block
    assert (scan.kernel, scan.grid) == ("spec_verify_scan_f16", (8 * 8 * 126 // 8, 1, 1))
    assert (flush.grid, flush.threads, flush.shared_bytes) == ((64, 1, 1), 512, 501 * 12)
    assert verify_launches(1, 1, 1, "float32")[0].grid == (1, 1, 1)


@pytest.mark.parametrize(("nodes", "vocab", "name"), [(257, 100, "nodes"), (4, 524289, "vocab"), (0, 100, "nodes")])
def test_what_the_kernels_cannot_hold_is_refused(nodes, vocab, name):
    with pytest.raises(
        RuntimeFault, match=rf"SpecVerify\.{name}: got {nodes if name == 'nodes' else vocab}; expected 1"
    ):
        verify_launches(1, nodes, vocab, "float16")


SOURCE = Path(__file__).with_name("fake_libcuda.cpp")
OPTIONS = ("-shared", "-Wl,-soname,libcuda.so.1", "-Wno-missing-field-initializers")


def test_every_verdict_and_cache_of_enqueue_is_the_twins(tmp_path):
    for module in ("tensorrt_rtx", "cuda.bindings.driver"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: NO ENQUEUE WAS RUN")
    host_lab._compile(host_lab.PLUGINS, *OPTIONS, str(SOURCE), "-o", str(tmp_path / "libcuda.so.1"))
    command = [sys.executable, "-m", "tests.plugins.driver_child", str(tmp_path / "libcuda.so.1")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    # Two launches a verdict, one a call of six caches.
    assert json.loads(done.stdout) == {"verdicts": 64, "caches": 24, "launches": 2 * 64 + 4, "wrong": []}
