# SPDX-License-Identifier: Apache-2.0
"""Build one plan in a child process: even if the builder crashes, the parent gets a plan or a BuildError."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speccompile.backends.machine import read_memory, read_peak_rss
from speccompile.backends.tensorrt.import_helper import text_from_lines
from speccompile.core.specs import GraphSpec
from speccompile.errors import BuildError

CHILD = "speccompile.backends.tensorrt.build_child"
GIB = 1 << 30
_POLL_S = 0.1
_TAIL_CHARS = 1500
_MEMORY_TODO = "Free memory, quantise the weights, or build on a larger machine: --dry-run predicts what a build needs."


@dataclass(frozen=True)
class BuildRequest:
    """The request to a child."""

    onnx: Path
    spec: GraphSpec
    variant: str
    settings: dict[str, Any]
    timing_cache: Path | None = None  # file of measured kernels; None: none is kept
    max_bytes: int | None = None  # the child is killed when it uses more memory; None: no limit

    def json_from_request(self, plan: Path) -> dict[str, Any]:
        """Returns the request as the child reads it."""
        return {
            "onnx": str(self.onnx),
            "plan": str(plan),
            "spec": self.spec.json_from_spec(),
            "variant": self.variant,
            "settings": self.settings,
            "timing_cache": None if self.timing_cache is None else str(self.timing_cache),
        }


@dataclass
class _Child:
    """State of a running child."""

    process: subprocess.Popen[bytes]
    stage: str = "start"
    result: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    lines: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=40))
    peak_bytes: int = 0


def child_command() -> list[str]:
    """Returns the child's command line, without the number of the pipe for its events."""
    return [sys.executable, "-m", CHILD]


def build_plan(request: BuildRequest, dest: Path, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Builds a plan in a child, which ends with this process and with this call, also at Ctrl-C.

    Args:
        dest: the plan's file, written atomically; its folder exists.
        progress: called with "STAGE" and "PHASE STEP/STEPS".

    Returns:
        {"stages": [{"name", "seconds", "peak_rss_bytes"}], "plan_bytes", "plugin_layers", "variant", "version",
        "peak_rss_bytes", "parent_rss_bytes": what this process held meanwhile, "lowering_peak_bytes": its most before}.

    Raises:
        BuildError: the graph is refused, the builder failed, crashed or ran out of memory; with the end of its log.
    """
    fresh = dest.with_name(f".{dest.name}.new")
    before = {"parent_rss_bytes": read_memory("VmRSS") or 0, "lowering_peak_bytes": read_peak_rss()}
    # The child's own temporary files are removed with this folder, however the child ends.
    with tempfile.TemporaryDirectory(prefix="speccompile-build-") as scratch:
        printed = Path(scratch) / "printed"
        try:
            with printed.open("wb") as output:
                child = _run(request, fresh, progress, output, scratch)
            _check_end(request, child, printed)
            assert child.result is not None
            os.replace(fresh, dest)
        finally:
            fresh.unlink(missing_ok=True)
    peak = max([child.peak_bytes, *(s["peak_rss_bytes"] for s in child.result["stages"])])
    return {**child.result, **before, "peak_rss_bytes": peak}


def _run(
    request: BuildRequest, plan: Path, progress: Callable[[str], None] | None, output: Any, scratch: str
) -> _Child:
    """Start the child and read its events until it ends."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        process = subprocess.Popen(
            [*child_command(), str(writer)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(writer,),
            env={**os.environ, "TMPDIR": scratch},
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends the child
        )
    finally:
        os.close(writer)
    child = _Child(process)
    try:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request.json_from_request(plan)).encode())
            process.stdin.close()
        except BrokenPipeError:  # it died at once: its exit status is more informative
            pass
        _listen(child, reader, request.max_bytes, progress)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(reader)
    return child


def _listen(child: _Child, reader: int, max_bytes: int | None, progress: Callable[[str], None] | None) -> None:
    """Read events until the pipe closes, and watch the child's memory."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            held = read_memory("VmRSS", child.process.pid) or 0
            child.peak_bytes = max(child.peak_bytes, held)
            if max_bytes is not None and held > max_bytes:
                child.process.kill()
                child.error = _memory_error(child, held, max_bytes)
                return
            if not selector.select(_POLL_S):
                continue
            data = os.read(reader, 1 << 16)
            if not data:
                child.process.wait()
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                _hear(child, json.loads(line), progress)


def _hear(child: _Child, event: dict[str, Any], progress: Callable[[str], None] | None) -> None:
    if "log" in event:
        child.lines.append((event["log"][0], event["log"][1]))
    elif "stage" in event:
        child.stage = event["stage"]
        if progress is not None:
            progress(child.stage)
    elif "progress" in event and progress is not None:
        phase, step, steps = event["progress"]
        progress(f"{phase} {step}/{steps}")
    elif "result" in event:
        child.result = event["result"]
    elif "error" in event:
        child.error = event["error"]


def _memory_error(child: _Child, held: int, max_bytes: int) -> dict[str, str]:
    return {
        "where": f"the builder's process, stage {child.stage}",
        "got": f"{held / GIB:.2f} GiB of memory",
        "expected": f"at most {max_bytes / GIB:.2f} GiB (engine.tensorrt.max_build_gib)",
        "todo": f"Raise engine.tensorrt.max_build_gib. {_MEMORY_TODO}",
    }


def _check_end(request: BuildRequest, child: _Child, printed: Path) -> None:
    """Raise what the child reported, or what follows from its exit status."""
    if child.error is not None:
        raise BuildError(**child.error)
    status = child.process.returncode
    if status == 0 and child.result is not None:
        return
    tail = printed.read_text(encoding="utf-8", errors="replace").strip()[-_TAIL_CHARS:]
    log = "\n".join(part for part in (text_from_lines(list(child.lines)), tail) if part) or "nothing in its log"
    where, expected = f"building {request.spec.name}, stage {child.stage}", "a plan"
    if status == -signal.SIGKILL:
        got = "the builder's process was killed (SIGKILL), as the kernel does when memory runs out; it held "
        got += f"{child.peak_bytes / GIB:.2f} GiB. Its log ends: {log}"
        raise BuildError(where, got, expected, _MEMORY_TODO)
    if status < 0:
        got = f"the builder crashed ({signal.Signals(-status).name}). Its log ends: {log}"
        todo = "Build with engine.plugins: none to distinguish plugins from TensorRT, and report it with the recipe."
        raise BuildError(where, got, expected, todo)
    got = f"the builder's process ended with status {status}. Its log ends: {log}"
    raise BuildError(where, got, expected, "See the log; check the installation of TensorRT.")
