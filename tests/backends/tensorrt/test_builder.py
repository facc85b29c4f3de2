# SPDX-License-Identifier: Apache-2.0
"""However the builder's process ends: a plan, or a BuildError with the reason, and no partial file."""

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from speccompile.backends.tensorrt import builder
from speccompile.errors import BuildError
from tests.backends.tensorrt.lab import leftovers, linear_request, misbehaving

pytestmark = pytest.mark.plan

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed: NO PLAN IS BUILT"
)
GOOD = """
send({"stage": "parse"})
open(request["plan"], "wb").write(b"a plan")
send({"progress": ["phase", 1, 4]})
send({"result": {"stages": [{"name": "parse", "seconds": 0.1, "peak_rss_bytes": 10}], "plan_bytes": 6,
                 "variant": "tensorrt_rtx", "version": "1"}})
"""


def build(folder, monkeypatch, code, **changes):
    """Build with `code` as the child; returns what was reported and the progress."""
    steps = []
    monkeypatch.setattr(builder, "child_command", lambda: misbehaving(textwrap.dedent(code)))
    request = linear_request(folder)
    request = type(request)(**{**vars(request), **changes})
    return builder.build_plan(request, folder / "g.plan", steps.append), steps


def test_a_good_child_gives_a_plan_and_its_report(tmp_path, monkeypatch):
    report, steps = build(tmp_path, monkeypatch, GOOD)
    assert (tmp_path / "g.plan").read_bytes() == b"a plan"
    assert leftovers(tmp_path) == ["g.plan"]
    assert steps == ["parse", "phase 1/4"]
    assert report["plan_bytes"] == 6
    assert report["peak_rss_bytes"] >= 10
    assert report["parent_rss_bytes"] > 0


DEATHS = [
    ("os.abort()", "crashed (SIGABRT)", "engine.plugins: none"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed (SIGSEGV)", "engine.plugins: none"),
    ("import ctypes; ctypes.string_at(0)", "crashed (SIGSEGV)", "engine.plugins: none"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "memory runs out", "--dry-run"),
    ("sys.exit(3)", "ended with status 3", "installation"),
    ("raise RuntimeError('out of luck')", "out of luck", "installation"),
    ("pass", "ended with status 0", "installation"),
]


@pytest.mark.parametrize(("code", "got", "todo"), DEATHS, ids=[d[0][:24] for d in DEATHS])
def test_a_child_that_dies_is_an_error_with_its_log(tmp_path, monkeypatch, code, got, todo):
    begin = 'send({"stage": "optimise"}); send({"log": [1, "the last words"]}); open(request["plan"], "wb").write(b"x")'
    with pytest.raises(BuildError) as caught:
        build(tmp_path, monkeypatch, f"{begin}\n{code}")
    assert got in caught.value.got
    assert "error: the last words" in caught.value.got
    assert caught.value.where == "building tiny, stage optimise"
    assert todo in caught.value.todo
    assert leftovers(tmp_path) == []


def test_what_native_code_prints_is_in_the_message(tmp_path, monkeypatch):
    with pytest.raises(BuildError, match="terminate called"):
        build(tmp_path, monkeypatch, "os.write(2, b'terminate called'); os.abort()")


def test_a_child_that_cannot_start_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "child_command", lambda: ["false"])
    with pytest.raises(BuildError, match="ended with status 1"):
        builder.build_plan(linear_request(tmp_path), tmp_path / "g.plan")
    assert leftovers(tmp_path) == []


def test_a_reported_error_arrives_as_it_is(tmp_path, monkeypatch):
    code = 'send({"error": {"where": "w", "got": "g", "expected": "e", "todo": "t"}})'
    with pytest.raises(BuildError) as caught:
        build(tmp_path, monkeypatch, code)
    assert (caught.value.where, caught.value.got, caught.value.expected, caught.value.todo) == ("w", "g", "e", "t")


def test_a_child_beyond_its_memory_is_ended(tmp_path, monkeypatch):
    code = 'send({"stage": "optimise"})\nheld = bytearray(os.urandom(1 << 20)) * 200\ntime.sleep(60)'
    with pytest.raises(BuildError) as caught:
        build(tmp_path, monkeypatch, code, max_bytes=100 << 20)
    assert "at most 0.10 GiB (engine.tensorrt.max_build_gib)" in caught.value.expected
    assert "quantise" in caught.value.todo
    assert leftovers(tmp_path) == []


PARENT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored
import sys
from pathlib import Path
from speccompile.backends.tensorrt import builder
from tests.backends.tensorrt.lab import linear_request, misbehaving
code = 'open(request["plan"], "wb").write(b"x"); print(os.getpid(), flush=True)\\n'
code += 'open(request["onnx"] + ".pid", "w").write(str(os.getpid()) + chr(10)); time.sleep(60)'
builder.child_command = lambda: misbehaving(code)
builder.build_plan(linear_request(Path(sys.argv[1])), Path(sys.argv[1]) / "g.plan")
"""


def test_ctrl_c_ends_the_child_and_leaves_nothing(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stderr=subprocess.PIPE)
    pid_file = tmp_path / "g.onnx.pid"
    try:
        while not (pid_file.exists() and pid_file.read_text().endswith("\n")):
            assert parent.poll() is None, parent.stderr.read()
            time.sleep(0.02)
        parent.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in parent.communicate()[1]
    finally:
        parent.kill()
        parent.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    pid_file.unlink()
    assert leftovers(tmp_path) == []


@needs_rtx
def test_a_real_plan_is_built_with_its_seconds_and_memory(tmp_path):
    steps = []
    report = builder.build_plan(linear_request(tmp_path), tmp_path / "g.plan", steps.append)
    assert (tmp_path / "g.plan").stat().st_size == report["plan_bytes"]
    assert [s["name"] for s in report["stages"]] == ["parse", "optimise"]
    assert all(s["peak_rss_bytes"] > 1 << 20 for s in report["stages"])
    assert steps[:2] == ["parse", "optimise"]


@needs_rtx
def test_an_unsupported_operator_is_named_with_its_node(tmp_path):
    with pytest.raises(BuildError) as caught:
        builder.build_plan(linear_request(tmp_path, op="Unique"), tmp_path / "g.plan")
    assert caught.value.where == "parsing g.onnx, node odd (Unique)"
    assert "tensorrt_rtx" in caught.value.expected
    assert leftovers(tmp_path) == []


@needs_rtx
def test_a_missing_plugin_is_an_error_and_no_crash(tmp_path):
    with pytest.raises(BuildError) as caught:
        builder.build_plan(linear_request(tmp_path, op="Nowhere", domain="speccompile"), tmp_path / "g.plan")
    assert caught.value.where == "parsing g.onnx, node odd (Nowhere)"
    assert caught.value.got == "no plugin Nowhere"
    assert caught.value.todo == "Build with engine.plugins: none."


@needs_rtx
def test_a_plugin_that_became_something_else_is_an_error(tmp_path):
    with pytest.raises(BuildError, match="0 plugin layers: SpecVerify became something else"):
        builder.build_plan(linear_request(tmp_path, plugins=["SpecVerify"]), tmp_path / "g.plan")


WRONG_PROFILES = {
    "opt below min": [{"x": [[2, 16], [1, 16], [4, 16]]}],
    "another static dim": [{"x": [[1, 8], [2, 8], [4, 8]]}],
    "rank": [{"x": [[1], [2], [4]]}],
    "no such input": [{"w": [[1, 16], [2, 16], [4, 16]]}],
    "an input left out": [{}],
}


@needs_rtx
@pytest.mark.parametrize("name", WRONG_PROFILES)
def test_a_wrong_profile_is_an_error(tmp_path, name):
    request = linear_request(tmp_path, shapes=WRONG_PROFILES[name])
    with pytest.raises(BuildError) as caught:
        builder.build_plan(request, tmp_path / "g.plan")
    assert "profile" in f"{caught.value.where} {caught.value.got}".lower()
    assert leftovers(tmp_path) == []


@needs_rtx
def test_inputs_that_are_not_those_of_the_spec_are_an_error(tmp_path):
    request = linear_request(tmp_path)
    tensor = request.spec.inputs[0]
    for wrong in (("y2", tensor.dims, "float16"), ("x", ("batch", 8), "float16"), ("x", tensor.dims, "float32")):
        spec = type(request.spec)("tiny", (type(tensor)(*wrong),), request.spec.outputs)
        with pytest.raises(BuildError, match="network tiny"):
            builder.build_plan(type(request)(**{**vars(request), "spec": spec}), tmp_path / "g.plan")
