# SPDX-License-Identifier: Apache-2.0
"""The whole way of a plugin's call but for the GPU: enqueue, the real driver bindings, a driver that simulates."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins import host_lab

pytestmark = pytest.mark.plan

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
