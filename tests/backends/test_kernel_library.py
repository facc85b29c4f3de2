# SPDX-License-Identifier: Apache-2.0
"""Finding, compiling, trying and switching off the library of CPU kernels."""

import fcntl
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest

from speccompile.backends.onnxruntime import kernel_build, kernel_library, kernel_selftest
from speccompile.backends.onnxruntime.kernel_selftest import Case, one_node_model, open_case, tail_fault
from speccompile.backends.onnxruntime.linear_cases import linear_cases, tail_cases
from speccompile.ops.candidates import NODE_PROBS_OP, TOP_TOKENS
from speccompile.ops.finite_token import FINITE_TOKEN
from speccompile.ops.kv_rollback import KV_ROLLBACK
from speccompile.ops.op import Op
from speccompile.ops.packed_linear import PACKED_LINEARS
from speccompile.ops.sample_token import SAMPLE_TOKEN
from speccompile.ops.spec_verify import SPEC_VERIFY
from tests.ops.op_lab import is_at_boundary
from tests.plugins.cpu_lab import library, needs_compiler

CRASH = 'extern "C" __attribute__((visibility("default"))) void* RegisterCustomOps(void*, void*) { __builtin_trap(); }'
WRONG = 'extern "C" __attribute__((visibility("default"))) void* RegisterCustomOps(void*, void*) { return nullptr; }'


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """A process that has not looked for the library yet."""
    kernel_library.begin_search.cache_clear()
    yield
    kernel_library.begin_search.cache_clear()


def test_the_switch_turns_the_library_off(monkeypatch):
    monkeypatch.setenv(kernel_library.SWITCH, "off")
    monkeypatch.setattr(kernel_library, "find_compiler", lambda: pytest.fail("looked for a compiler"))
    assert kernel_library.find_library() is None
    assert not kernel_library.register_kernels(ort.SessionOptions())


@pytest.mark.parametrize("missing", ["find_compiler", "find_sources"])
def test_without_compiler_or_sources_there_is_none(missing, monkeypatch, caplog):
    monkeypatch.delenv(kernel_library.SWITCH)
    monkeypatch.setattr(kernel_library, missing, lambda: None)
    with caplog.at_level(logging.WARNING):
        assert kernel_library.find_library() is None and kernel_library.find_library() is None
    [message] = caplog.messages
    assert "no CPU kernels (no " in message and "ONNX Runtime's own are used" in message


@pytest.mark.plan
@needs_compiler
def test_a_compiled_library_is_kept_and_tried_once(monkeypatch):
    found = library()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started a child process"))
    kernel_library.begin_search.cache_clear()
    assert kernel_library.find_library() == found
    assert kernel_library.register_kernels(ort.SessionOptions())


@pytest.mark.plan
@needs_compiler
@pytest.mark.parametrize(("source", "expected"), [(CRASH, "self-test ended with -"), (WRONG, "self-test ended with 1")])
def test_a_library_that_crashes_or_has_no_kernels_is_not_used(source, expected, tmp_path, monkeypatch, caplog):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "library.cpp").write_text(source)
    monkeypatch.setenv(kernel_library.SWITCH, str(tmp_path / "kept"))
    monkeypatch.setattr(kernel_library, "find_sources", lambda: sources)
    with caplog.at_level(logging.WARNING):
        assert kernel_library.find_library() is None
    assert expected in caplog.text
    # The result is kept: the next process does not try again.
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("tried again"))
    kernel_library.begin_search.cache_clear()
    assert kernel_library.find_library() is None


def test_the_search_runs_in_a_thread_and_is_joined(tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_library.SWITCH, str(tmp_path))
    monkeypatch.setattr(kernel_library, "find_compiler", lambda: "c++")
    monkeypatch.setattr(kernel_library, "_prebuilt", list)
    begun, ready = threading.Event(), threading.Event()

    def compile_library(sources: Path, dest: Path, *_: Any) -> None:
        begun.set()
        assert ready.wait(60)
        dest.write_bytes(b"code")

    monkeypatch.setattr(kernel_library, "compile_library", compile_library)
    monkeypatch.setattr(kernel_library, "_run_selftest", lambda library: None)
    assert not kernel_library.is_compiled()
    found = kernel_library.begin_search()
    assert begun.wait(60) and not found.done() and not kernel_library.is_compiled()
    ready.set()
    assert kernel_library.find_library() == found.result() and kernel_library.is_compiled()


def test_a_library_that_another_process_compiles_is_awaited(tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_library.SWITCH, str(tmp_path))
    monkeypatch.setattr(kernel_library, "find_compiler", lambda: "c++")
    monkeypatch.setattr(kernel_library, "_prebuilt", list)
    begun = threading.Event()
    monkeypatch.setattr(kernel_library, "compile_library", lambda *_: begun.set())
    monkeypatch.setattr(kernel_library, "_run_selftest", lambda library: None)
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    found = kernel_library.begin_search()
    assert not begun.wait(0.3)
    path = kernel_library._path_of(kernel_library.find_sources(), "c++")
    path.write_bytes(b"code")
    path.chmod(0o600)
    os.close(handle)
    assert found.result() == path and not begun.is_set()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"fault": 3}', b'{"fault"', b"\xff", b"[" * 9999])
def test_a_damaged_record_is_made_anew(damage, tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_library.SWITCH, str(tmp_path / "kept"))
    monkeypatch.setattr(kernel_library, "_run_selftest", lambda library: "it crashed")
    (library := tmp_path / "cpu.so").write_bytes(b"code")
    assert kernel_library.fault_of(library) == "it crashed"
    [record] = (tmp_path / "kept").iterdir()
    whole = record.read_bytes()
    record.write_bytes(damage)
    assert kernel_library.fault_of(library) == "it crashed" and record.read_bytes() == whole
    monkeypatch.setattr(kernel_library, "_run_selftest", lambda library: pytest.fail("tried again"))
    assert kernel_library.fault_of(library) == "it crashed"
    record.chmod(0o666)  # whoever wrote it could have said that a library works
    monkeypatch.setattr(kernel_library, "_run_selftest", lambda library: "tried again")
    assert kernel_library.fault_of(library) == "tried again"


@pytest.mark.parametrize(("damage", "mode"), [(b"planted", 0o660), (b"com", 0o600), (b"", 0o600)])
def test_a_library_that_others_could_write_or_that_was_damaged_is_compiled_anew(damage, mode, tmp_path, monkeypatch):
    def compile_library(sources: Path, dest: Path, *rest: object) -> None:
        dest.write_bytes(b"compiled")

    monkeypatch.setenv(kernel_library.SWITCH, str(tmp_path / "kept"))
    monkeypatch.setattr(kernel_library, "find_compiler", lambda: "c++")
    monkeypatch.setattr(kernel_library, "compile_library", compile_library)
    monkeypatch.setattr(kernel_library, "_run_selftest", lambda library: None)
    made = kernel_library.find_library()
    assert made is not None
    made.write_bytes(damage)
    made.chmod(mode)
    kernel_library.begin_search.cache_clear()
    assert kernel_library.find_library() == made and made.read_bytes() == b"compiled"


@pytest.mark.plan
@needs_compiler
def test_sources_that_do_not_compile_are_reported(tmp_path, monkeypatch, caplog):
    (tmp_path / "library.cpp").write_text("int main( {")
    monkeypatch.setenv(kernel_library.SWITCH, str(tmp_path / "kept"))
    monkeypatch.setattr(kernel_library, "find_sources", lambda: tmp_path)
    with caplog.at_level(logging.WARNING):
        assert kernel_library.find_library() is None
    assert "error" in caplog.text and list((tmp_path / "kept").iterdir()) == []


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a wheel's libraries, each of which passes its self-test."""
    for variant in kernel_build.VARIANTS:
        (tmp_path / f"{variant.name}.so").write_bytes(b"")
    monkeypatch.delenv(kernel_library.SWITCH)
    monkeypatch.setattr(kernel_library, "prebuilt_folder", lambda: tmp_path)
    monkeypatch.setattr(kernel_library, "fault_of", lambda path: None)
    monkeypatch.setattr(kernel_library, "_compiled", lambda: (tmp_path / "compiled.so", ""))
    monkeypatch.setattr(kernel_library.platform, "machine", lambda: "x86_64")
    return tmp_path


def test_the_best_library_of_a_wheel_is_used_where_the_cpu_has_its_instructions(wheel, monkeypatch):
    best, lesser = kernel_build.VARIANTS
    for features, has_compiler, expected in (
        (best.features, True, best.name),
        (lesser.features, True, "compiled"),
        (lesser.features, False, lesser.name),
        (frozenset({"sse2"}), True, "compiled"),
    ):
        monkeypatch.setattr(kernel_library, "cpu_features", lambda features=features: features)
        if not has_compiler:
            monkeypatch.setattr(kernel_library, "_compiled", lambda: (None, "no C++ compiler"))
        else:
            monkeypatch.setattr(kernel_library, "_compiled", lambda: (wheel / "compiled.so", ""))
        kernel_library.begin_search.cache_clear()
        assert kernel_library.find_library() == wheel / f"{expected}.so"


def test_a_library_that_fails_gives_way_to_the_next(wheel, monkeypatch):
    best, lesser = kernel_build.VARIANTS
    monkeypatch.setattr(kernel_library, "cpu_features", lambda: best.features)
    failing = {best.name}
    monkeypatch.setattr(kernel_library, "fault_of", lambda path: "no" if path.stem in failing else None)
    assert kernel_library.find_library() == wheel / "compiled.so"
    failing.add("compiled")
    kernel_library.begin_search.cache_clear()
    assert kernel_library.find_library() == wheel / f"{lesser.name}.so"


def test_a_checkout_has_no_libraries_of_a_wheel():
    assert not kernel_library.prebuilt_folder().exists()


def test_the_digest_changes_with_every_source(tmp_path):
    (tmp_path / "library.cpp").write_text("a")
    (tmp_path / "linear.h").write_text("b")
    digests = [kernel_build.sources_digest(tmp_path)]
    (tmp_path / "linear.h").write_text("c")
    digests.append(kernel_build.sources_digest(tmp_path))
    (tmp_path / "linear.h").rename(tmp_path / "other.h")
    digests.append(kernel_build.sources_digest(tmp_path))
    assert len(set(digests)) == 3


@pytest.mark.plan
@needs_compiler
def test_the_self_test_runs_every_linear_and_reports_a_wrong_one():
    names = dict.fromkeys(op.name for op, _, _ in linear_cases())
    assert list(names) == [op.name for op in PACKED_LINEARS]
    child = [sys.executable, "-m", kernel_library.SELFTEST, str(library())]
    assert subprocess.run(child, check=False).returncode == 0


def test_the_self_test_calls_every_kernel_of_a_tail_far_from_ties():
    """Rounding on another CPU must not change an integer."""
    cases = list(tail_cases())
    kernels = (SPEC_VERIFY, FINITE_TOKEN, SAMPLE_TOKEN, TOP_TOKENS, NODE_PROBS_OP, KV_ROLLBACK)
    assert {op.name for op, _, _ in cases} == {op.name for op in kernels}
    for op, inputs, _ in cases:
        assert op is not SPEC_VERIFY or not is_at_boundary(inputs)


@pytest.mark.plan
@needs_compiler
def test_a_wrong_kernel_of_a_tail_is_reported(monkeypatch):
    """Here it is the twin that is wrong."""
    assert tail_fault(str(library())) is None
    calls = [(op, inputs, attributes) for op, inputs, attributes in tail_cases() if op in (SPEC_VERIFY, NODE_PROBS_OP)]
    wrong: list[tuple[Op, int]] = [(SPEC_VERIFY, 1), (SPEC_VERIFY, 2), (NODE_PROBS_OP, 0)]
    for op, output in wrong:

        def twin(*inputs: Any, op: Op = op, output: int = output) -> tuple[Any, ...]:
            made = list(op.twin(*inputs))
            made[output] = made[output].copy()
            made[output].flat[-1] += 1
            return tuple(made)

        changed = [(replace(op, twin=twin), *rest) for other, *rest in calls if other is op]
        monkeypatch.setattr(kernel_selftest, "tail_cases", lambda changed=changed: iter(changed))
        assert f"{op.name}: {op.outputs[output].name}" in str(tail_fault(str(library())))


@pytest.mark.plan
@needs_compiler
def test_sessions_of_the_self_test_run_the_kernels():
    """The tiny models carry no bodies: without the library they do not load."""
    case = Case(*next(linear_cases()), by_row=())
    open_case(case, str(library()))
    sides = [[(t.name, t.dtype) for t in side] for side in (case.op.inputs, case.op.outputs)]
    model = one_node_model("speccompile", case.op.name, *sides, case.attributes)
    [node] = onnx.load_from_string(model).graph.node
    read = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert (node.domain, node.op_type, read) == ("speccompile", case.op.name, pytest.approx(case.attributes))
    with pytest.raises(Exception, match=case.op.name):
        ort.InferenceSession(model, providers=["CPUExecutionProvider"])


def test_another_selftest_tries_a_library_anew(tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_library.SWITCH, str(tmp_path / "kept"))
    (library := tmp_path / "cpu.so").write_bytes(b"code")
    for code, fault in (("old", "it crashed"), ("new", None), ("old", "it crashed")):
        (selftest := tmp_path / f"{code}.py").write_text(code)
        monkeypatch.setattr(kernel_library, "_SELFTEST_FILE", selftest)
        monkeypatch.setattr(kernel_library, "_run_selftest", lambda library, told=fault: told)
        assert kernel_library.fault_of(library) == fault
