# SPDX-License-Identifier: Apache-2.0
"""The C++ plugin library compiles, loads in TensorRT-RTX, and plans are built with it and carry it."""

import glob
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speccompile.backends.tensorrt.import_helper import installed_variants
from speccompile.backends.tensorrt.kernels import find_nvcc

pytestmark = pytest.mark.plan

ROOT = Path(__file__).parents[3]
_PLACES = ("/usr/include", "/usr/include/*-linux-gnu", "/usr/local/tensorrt/include", "/usr/local/TensorRT*/include")


def _headers() -> str | None:
    given = [os.environ["TENSORRT_INCLUDE_DIR"]] if os.environ.get("TENSORRT_INCLUDE_DIR") else []
    candidates = given + [candidate for pattern in _PLACES for candidate in sorted(glob.glob(pattern))]
    return next((candidate for candidate in candidates if (Path(candidate) / "NvInfer.h").is_file()), None)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    headers, nvcc = _headers(), find_nvcc()
    if headers is None or nvcc is None or "tensorrt_rtx" not in installed_variants():
        lacks = [
            name
            for name, there in (("TensorRT's headers (set TENSORRT_INCLUDE_DIR)", headers), ("nvcc", nvcc))
            if not there
        ]
        pytest.skip(f"THE C++ PLUGIN LIBRARY WAS NOT COMPILED: no {', '.join(lacks) or 'TensorRT-RTX'}")
    built = tmp_path_factory.mktemp("library") / "libspeccompile_plugins.so"
    command = ["make", "plugins", f"TENSORRT_INCLUDE_DIR={headers}", f"PLUGIN_LIBRARY={built}"]
    command += ["PLUGIN_ARCHS=80", f"NVCC={nvcc}"]  # one GPU: the sources are the same for all
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return built


def test_the_library_exports_what_tensorrt_looks_for_and_needs_nothing_of_it(library):
    def names(*options: str) -> set[str]:
        done = subprocess.run(["nm", "-D", *options, str(library)], capture_output=True, text=True, check=True)
        return {line.split()[-1] for line in done.stdout.splitlines()}

    assert {"getCreators", "setLoggerFinder"} <= names("--defined-only")
    assert not {
        name for name in names("--undefined-only") if "nvinfer" in name or name.startswith(("cuda", "getPlugin"))
    }


def test_plans_are_built_with_it(library):
    command = [sys.executable, "-m", "tests.backends.tensorrt.library_child", str(library)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["registered"] == 0
    assert said["plugins"] == ["verify", "compact"]
    assert said["float16"] > 0 and said["bfloat16"] > 0 and said["map"] > 0
    assert said["embedded"] > said["float16"] + library.stat().st_size // 2  # the library is in the plan
    assert said["ops"] == ["SpecVerify", "KVRollback"]
    assert said["wrong"] and said["errors"] == [
        "KVRollback: got 6 inputs; expected 1 caches (num_caches), lengths and path."
    ]


def test_without_headers_make_says_what_to_give(tmp_path):
    command = ["make", "plugins", f"TENSORRT_INCLUDE_DIR={tmp_path}", f"PLUGIN_LIBRARY={tmp_path}/lib.so"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"not at '{tmp_path}': make plugins TENSORRT_INCLUDE_DIR=..." in done.stderr
