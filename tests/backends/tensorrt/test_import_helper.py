# SPDX-License-Identifier: Apache-2.0
"""Which TensorRT is imported, errors of a missing one, the bindings of full TensorRT over stubs."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections import deque
from types import SimpleNamespace

import pytest

from speccompile.backends.tensorrt import import_helper
from speccompile.backends.tensorrt.variants import TENSORRT, TENSORRT_RTX, VARIANTS
from speccompile.common.extras import install_command
from speccompile.errors import BuildError
from tests.backends.tensorrt.bindings_child import STUBS

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed: NOTHING OF IT IS TESTED"
)


@pytest.fixture
def packages(monkeypatch):
    """A set of packages that count as installed; loading returns only the name."""
    there = set()
    real = importlib.util.find_spec
    monkeypatch.setattr(
        import_helper.importlib.util,
        "find_spec",
        lambda name, *rest: (SimpleNamespace() if name in there else None) if name in VARIANTS else real(name, *rest),
    )
    return there


def test_without_any_variant_the_error_says_what_to_install(packages):
    with pytest.raises(BuildError) as caught:
        import_helper.load_tensorrt("auto")
    assert caught.value.got == "neither tensorrt nor tensorrt_rtx is installed"
    assert f"{install_command('tensorrt-rtx')} or {install_command('tensorrt')}" in caught.value.todo


@pytest.mark.parametrize(("name", "extra"), [("tensorrt", "tensorrt"), ("tensorrt_rtx", "tensorrt-rtx")])
def test_a_named_variant_that_is_missing_names_its_extra(packages, name, extra):
    import_helper._load.cache_clear()
    with pytest.raises(BuildError) as caught:
        import_helper.load_tensorrt(name)
    assert caught.value.got == f"no package {name}"
    assert install_command(extra) in caught.value.todo


@pytest.mark.parametrize(
    ("there", "gpus", "taken"),
    [
        ({"tensorrt"}, (), "tensorrt"),
        ({"tensorrt_rtx"}, ((9, 0),), "tensorrt_rtx"),
        ({"tensorrt", "tensorrt_rtx"}, (), "tensorrt_rtx"),
        ({"tensorrt", "tensorrt_rtx"}, ((9, 0),), "tensorrt"),
    ],
)
def test_auto_takes_what_is_there_and_can_build(packages, monkeypatch, there, gpus, taken):
    packages |= there
    monkeypatch.setattr(import_helper, "find_compute_capabilities", lambda: gpus)
    monkeypatch.setattr(import_helper, "_load", lambda name: name)
    assert import_helper.load_tensorrt("auto") == taken


class Driver:
    """Two GPUs, as the driver's library reports them."""

    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def cuDeviceGetName(self, name, size, ordinal):
        name.value = (b"NVIDIA L4", b"NVIDIA T4")[ordinal]

    def cuDeviceGetAttribute(self, value, attribute, ordinal):
        value._obj.value = ((8, 9), (7, 5))[ordinal][attribute - 75]


def test_the_driver_is_asked_for_gpus(monkeypatch):
    monkeypatch.setattr(import_helper.ctypes, "CDLL", lambda name: Driver())
    gpus = import_helper.find_gpus.__wrapped__()
    assert gpus == (("NVIDIA L4", 8, 9), ("NVIDIA T4", 7, 5))
    monkeypatch.setattr(import_helper, "find_gpus", lambda: gpus)
    assert import_helper.find_compute_capabilities() == ((8, 9), (7, 5))


def test_an_import_that_fails_becomes_an_error_with_its_reason(packages, monkeypatch):
    packages.add("tensorrt")
    import_helper._load.cache_clear()
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # what an import of a broken package raises: ImportError
    with pytest.raises(BuildError, match="tensorrt cannot be imported"):
        import_helper.load_tensorrt("tensorrt")


def test_the_variants_differ_where_the_build_asks():
    assert TENSORRT.needs_gpu_to_build
    assert not TENSORRT_RTX.needs_gpu_to_build
    assert TENSORRT_RTX.supports_compute_capabilities
    assert not TENSORRT.supports_compute_capabilities


@needs_rtx
def test_a_loaded_variant_has_one_logger():
    first, second = import_helper.load_tensorrt("tensorrt_rtx"), import_helper.load_tensorrt("tensorrt_rtx")
    assert first.logger is second.logger
    assert first.version == first.trt.__version__


UNKNOWN = """
import onnx
from onnx import helper as h
from speccompile.backends.tensorrt.import_helper import load_tensorrt
variant = load_tensorrt("tensorrt_rtx")
trt = variant.trt
value = lambda name: h.make_tensor_value_info(name, 1, [2])
node = h.make_node("Nowhere", ["x"], ["y"], domain="speccompile", name="here")
opsets = [h.make_opsetid("", 24), h.make_opsetid("speccompile", 1)]
model = h.make_model(h.make_graph([node], "g", [value("x")], [value("y")]), opset_imports=opsets, ir_version=10)
network = trt.Builder(variant.logger).create_network(0)
parser = trt.OnnxParser(network, variant.logger)
assert not parser.parse(model.SerializeToString())
print("alive", parser.get_error(0).node_name())
"""


@needs_rtx
def test_an_unknown_plugin_node_does_not_end_the_process():
    done = subprocess.run([sys.executable, "-c", UNKNOWN], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "alive here"), done.stderr


def test_lines_of_the_log_from_warnings_up_come_first():
    lines = [(3, "info"), (2, "careful"), (1, "broken"), (3, "more")]
    assert import_helper.text_from_lines(lines) == "warning: careful\nerror: broken"
    assert import_helper.text_from_lines([(3, "a"), (3, "b")], max_lines=1) == "info: b"


def test_lines_may_come_while_they_are_read():
    class Row(tuple):
        def __getitem__(self, index):
            lines.append((1, "late"))
            return super().__getitem__(index)

    lines = deque([Row((1, "broken"))])
    assert import_helper.text_from_lines(lines) == "error: broken"


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
