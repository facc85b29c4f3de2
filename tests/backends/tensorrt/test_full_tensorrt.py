# SPDX-License-Identifier: Apache-2.0
"""Full TensorRT, which needs a GPU's libraries: its real bindings over stubs, so that a changed interface shows."""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest

from tests.backends.tensorrt.bindings_child import STUBS

# Entry points that the bindings link to; their results are never used.
SYMBOLS = (
    *("createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL"),
    *("createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getBuilderPluginRegistry"),
    *("getNvOnnxParserVersion", "getPluginRegistry", "initLibNvInferPlugins"),
)
# TensorRT-RTX alone has these, and the backend asks for them only where `Capabilities` says so.
OF_RTX_ALONE = [
    *("ComputeCapability", "CudaGraphStrategy", "CudaGraphStrategy.WHOLE_GRAPH_CAPTURE"),
    *("DynamicShapesKernelSpecializationStrategy", "DynamicShapesKernelSpecializationStrategy.EAGER"),
]


def test_the_backend_finds_what_it_asks_of_full_tensorrt(tmp_path):
    if importlib.util.find_spec("tensorrt_bindings") is None or shutil.which("gcc") is None:
        pytest.skip("tensorrt-cu13-bindings or gcc is not installed: FULL TENSORRT WAS NOT LOOKED AT")
    source = tmp_path / "stubs.c"
    source.write_text("\n".join(f"void* {symbol}(void) {{ return 0; }}" for symbol in SYMBOLS))
    for name in STUBS:
        subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", source, "-o", tmp_path / name], check=True)
    command = [sys.executable, "-m", "tests.backends.tensorrt.bindings_child", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])  # the bindings print warnings before
    assert found.pop("version").startswith("11.")
    assert found == {
        "missing": OF_RTX_ALONE,
        "creators": ["KVRollback", "SpecVerify"],
        "lines": [[2, "a line"]],
        "written": [4, "plan"],
        "events": 1,
    }
