# SPDX-License-Identifier: Apache-2.0
"""Import TensorRT, whichever variant is installed, with its libraries found and one logger for the process."""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import importlib.util
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from speccompile.backends.tensorrt.variants import TENSORRT, TENSORRT_RTX, VARIANTS, Capabilities, Variant
from speccompile.common.extras import install_command
from speccompile.errors import BuildError

MAX_LOG_LINES = 400
_LEVELS = ("internal error", "error", "warning", "info", "verbose")


def load_tensorrt(variant: str = "auto") -> Variant:
    """Imports a variant, once per process. `auto`: of two, full TensorRT where there is a GPU, else TensorRT-RTX."""
    if variant != "auto":
        return _load(VARIANTS[variant].name)
    installed = installed_variants()
    if not installed:
        raise _missing("neither tensorrt nor tensorrt_rtx is installed", "one of them", (TENSORRT_RTX, TENSORRT))
    if len(installed) == 2:
        installed = installed[::-1] if not find_compute_capabilities() else installed
    return _load(installed[0])


def installed_variants() -> list[Any]:
    """Returns the names of the installed variants, full TensorRT first; nothing is imported."""
    return [name for name in VARIANTS if importlib.util.find_spec(name) is not None]


def find_compute_capabilities() -> tuple[tuple[int, int], ...]:
    return tuple((major, minor) for _, major, minor in find_gpus())


@functools.cache
def find_gpus() -> tuple[tuple[str, int, int], ...]:
    """Returns (name, major, minor) of this machine's GPUs from the CUDA driver; empty without a driver or a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = []
    for ordinal in range(count.value):
        name, pair = ctypes.create_string_buffer(256), []
        driver.cuDeviceGetName(name, len(name), ordinal)
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            value = ctypes.c_int()
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, ordinal)
            pair.append(value.value)
        found.append((name.value.decode(errors="replace"), pair[0], pair[1]))
    return tuple(found)


@functools.cache
def _load(name: str) -> Variant:
    can = VARIANTS[name]
    if importlib.util.find_spec(name) is None:
        raise _missing(f"no package {name}", f"TensorRT of variant {name}", (can,))
    link_libraries(can)
    try:
        trt = importlib.import_module(name)
    except (ImportError, OSError) as fault:  # the stub of full TensorRT without its libraries raises either
        raise _missing(f"{name} cannot be imported: {fault}", "its libraries beside it", (can,)) from fault
    return Variant(can, trt, str(trt.__version__), make_logger(trt))


def _missing(got: str, expected: str, wanted: Sequence[Capabilities]) -> BuildError:
    commands = " or ".join(install_command(can.extra) for can in wanted)
    note = " TensorRT-RTX builds without a GPU." if TENSORRT_RTX in wanted else ""
    return BuildError("engine.backend tensorrt", got, expected, f"Run: {commands}.{note}")


def link_libraries(can: Capabilities) -> Path | None:
    """Provides the unversioned library name that the parser opens and its wheel does not ship.

    A library finds others beside the path by which it was opened, so links in a folder of our own, opened before the
    module is imported, replace the missing file. Returns the folder, or None: nothing was missing.
    """
    if can.unversioned_library is None or can.name in sys.modules:
        return None
    spec = importlib.util.find_spec(f"{can.name}_libs")
    if spec is None or not spec.submodule_search_locations:
        return None  # a system-wide installation has the name
    source = Path(next(iter(spec.submodule_search_locations))).resolve()
    if (source / can.unversioned_library).exists() or not (source / can.library).exists():
        return None
    keeper = tempfile.TemporaryDirectory(prefix="speccompile-trt-")
    folder = Path(keeper.name)
    atexit.register(keeper.cleanup)
    for link, library in (
        (can.library, can.library),
        (can.parser_library, can.parser_library),
        (can.unversioned_library, can.library),
    ):
        (folder / link).symlink_to(source / library)
    for link in (can.library, can.parser_library):
        ctypes.CDLL(str(folder / link))
    return folder


def make_logger(trt: ModuleType) -> Any:
    """Returns a logger that prints nothing and keeps the last lines from info up in `lines`, a deque of (level, text).

    Level 0 is an internal error, 4 verbose. `listener`, None or a callable (level, text), gets every line.
    """

    class KeptLines(trt.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: deque[tuple[int, str]] = deque(maxlen=MAX_LOG_LINES)
            self.listener: Any = None

        def log(self, severity: Any, message: str) -> None:
            level = int(severity)
            if level > 3:  # verbose: thousands of lines per build
                return
            self.lines.append((level, message))
            if self.listener is not None:
                self.listener(level, message)

    return KeptLines()


def text_from_lines(lines: Sequence[tuple[int, str]], max_lines: int = 12) -> str:
    """Returns the last lines from warnings up, or where there are none the last of all, one per row."""
    rows = list(lines)  # threads of TensorRT may add some meanwhile
    important = [row for row in rows if row[0] <= 2] or rows
    return "\n".join(f"{_LEVELS[level]}: {text}" for level, text in important[-max_lines:])
