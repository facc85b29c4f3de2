# SPDX-License-Identifier: Apache-2.0
"""The process in which TensorRT builds one plan; `builder.build_plan` starts it.

    python -m speccompile.backends.tensorrt.build_child EVENTS_FD < request.json

Events go to the pipe EVENTS_FD, one JSON object per line; standard output and error are native code's.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from speccompile.backends.machine import read_peak_rss, reset_peak_rss
from speccompile.backends.tensorrt import network as networks
from speccompile.backends.tensorrt.import_helper import find_compute_capabilities, load_tensorrt, text_from_lines
from speccompile.backends.tensorrt.variants import Variant
from speccompile.common.disk import error_from_fault
from speccompile.core.specs import spec_from_json
from speccompile.errors import BuildError

Send = Callable[[Mapping[str, Any]], None]
_PR_SET_PDEATHSIG = 1
_REPORT_EVERY_S = 0.1


def main() -> None:
    """Build the plan of the request on standard input."""
    _depend_on_parent()
    send = _sender(int(sys.argv[1]))
    request = json.load(sys.stdin)
    try:
        send({"result": build(request, send)})
    except OSError as fault:
        send({"error": _json_from_error(error_from_fault(fault, Path(request["plan"])))})
    except BuildError as fault:
        send({"error": _json_from_error(fault)})


def build(request: Mapping[str, Any], send: Send) -> dict[str, Any]:
    """Parses, builds, and writes the plan.

    Returns:
        {"stages": [{"name", "seconds", "peak_rss_bytes"}], "plan_bytes", "plugin_layers": {name: layers of the
        network}, "variant", "version"}.
    """
    stages: list[dict[str, Any]] = []
    variant = load_tensorrt(request["variant"])
    variant.logger.listener = lambda level, text: send({"log": [level, text]}) if level <= 2 else None
    settings, source, dest = request["settings"], Path(request["onnx"]), Path(request["plan"])
    trt, spec = variant.trt, spec_from_json(request["spec"])
    if settings["plugins"]:
        _register_plugins(trt, settings["plugins"], variant.can.needs_gpu_to_build)
    builder = trt.Builder(variant.logger)
    with _stage("parse", stages, send):
        network, parser = networks.parse_network(variant, builder, source, settings["plugins"])
        networks.check_network(variant, network, spec)
        plugin_layers = networks.count_plugins(variant, network)
        config = networks.configure(variant, builder, settings)
    timing_cache = Path(request["timing_cache"]) if request["timing_cache"] else None
    cache = networks.load_timing_cache(variant, config, timing_cache)
    config.progress_monitor = make_monitor(trt, send)
    with _stage("optimise", stages, send), dest.open("wb") as file:
        writer = make_writer(trt, file)
        built = builder.build_serialized_network_to_stream(network, config, writer)
        file.flush()
        os.fsync(file.fileno())
    if writer.fault is not None:
        raise error_from_fault(writer.fault, dest)
    if not built or writer.num_bytes == 0:
        raise _builder_error(variant, source)
    if cache is not None and timing_cache is not None:
        networks.save_timing_cache(config, timing_cache)
    del parser
    names: dict[str, Any] = {"variant": variant.name, "version": variant.version}
    return {"stages": stages, "plan_bytes": writer.num_bytes, "plugin_layers": plugin_layers, **names}


def _register_plugins(trt: ModuleType, plugins: Sequence[str], needs_gpu: bool) -> None:
    from speccompile.backends.tensorrt.kernels import compile_kernels
    from speccompile.backends.tensorrt.plugins import register_plugins

    register_plugins(trt)
    for capability in find_compute_capabilities()[:1] if needs_gpu else ():  # the builder times the plugins on it
        for op in plugins:
            compile_kernels(op, capability)


@contextlib.contextmanager
def _stage(name: str, stages: list[dict[str, Any]], send: Send) -> Iterator[None]:
    send({"stage": name})
    reset_peak_rss()
    start = time.perf_counter()
    yield
    seconds = round(time.perf_counter() - start, 3)
    stages.append({"name": name, "seconds": seconds, "peak_rss_bytes": read_peak_rss()})


def make_writer(trt: ModuleType, file: Any) -> Any:
    """Returns a stream to which TensorRT writes the plan, so that it is never in memory as a whole.

    It has `num_bytes` written, and `fault`, the OSError that ended it or None.
    """

    class FileWriter(trt.IStreamWriter):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.num_bytes = 0
            self.fault: OSError | None = None

        def write(self, data: Any) -> int:
            try:
                file.write(data)
            except OSError as fault:  # an exception must not pass through native code
                self.fault = fault
                return 0
            self.num_bytes += len(data)
            return len(data)

    return FileWriter()


def make_monitor(trt: ModuleType, send: Send) -> Any:
    """Returns a progress monitor that sends {"progress": [phase, step, steps]} at most ten times a second."""
    lock, totals, last = threading.Lock(), dict[str, int](), [0.0]

    def report(phase: str, step: int) -> None:
        now = time.monotonic()
        with lock:
            if now - last[0] < _REPORT_EVERY_S:
                return
            last[0] = now
        send({"progress": [phase, step, totals.get(phase, 0)]})

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None:
            totals[phase_name] = num_steps
            report(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            report(phase_name, step + 1)
            return True

        def phase_finish(self, phase_name: str) -> None:
            totals.pop(phase_name, None)

    return Monitor()


def _sender(descriptor: int) -> Send:
    stream, lock = os.fdopen(descriptor, "w", encoding="utf-8"), threading.Lock()

    def send(event: Mapping[str, Any]) -> None:
        with lock:  # TensorRT logs from several threads
            stream.write(json.dumps(event) + "\n")
            stream.flush()

    return send


def _depend_on_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _json_from_error(fault: BuildError) -> dict[str, str]:
    return {"where": fault.where, "got": fault.got, "expected": fault.expected, "todo": fault.todo}


def _builder_error(variant: Variant, source: Path) -> BuildError:
    got = text_from_lines(variant.logger.lines) or "no plan and no reason"
    todo = (
        "See the builder's message; engine.plugins: none and engine.tensorrt.optimization_level change what it tries."
    )
    return BuildError(f"building {source.name}", got, "a plan", todo)


if __name__ == "__main__":
    main()
