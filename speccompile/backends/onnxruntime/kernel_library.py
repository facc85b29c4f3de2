# SPDX-License-Identifier: Apache-2.0
"""The library of CPU kernels (`plugins/cpu`): found, compiled for this CPU, tried once, registered in sessions.

ONNX Runtime takes its kernel for an op of the domain `speccompile`, else the op's function body. The library is kept in
the user's cache folder under the digest of sources, compiler and CPU; a wheel has some for common CPUs. Before its
first use, a child process runs every kernel: a library that crashes or computes wrong numbers is not used.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import onnxruntime as ort

from speccompile.backends.onnxruntime.kernel_build import (
    FLAGS,
    VARIANTS,
    compile_library,
    cpu_features,
    find_compiler,
    native_flags,
    sources_digest,
)
from speccompile.common.code_cache import find_code_file, write_file
from speccompile.common.waiting import tell

_log = logging.getLogger(__name__)

SWITCH = "SPECCOMPILE_CPU_KERNELS"  # off: no library; a folder: where compiled ones are kept
SELFTEST = "speccompile.backends.onnxruntime.kernel_selftest"
_KIND = "kernels"  # the folder in the cache
_SELFTEST_FILE = Path(__file__).with_name("kernel_selftest.py")
_SELFTEST_S = 300  # seconds until a child that hangs is killed; it takes about one


def find_sources() -> Path | None:
    """Returns the folder of the sources: inside an installed package, beside it in a checkout; None in neither."""
    package = Path(__file__).parents[2]
    candidates = (package / "plugin_sources/cpu", package.parent / "plugins/cpu")
    return next((folder for folder in candidates if (folder / "library.cpp").is_file()), None)


def code_file(name: str) -> Path:
    """Returns a file where compiled libraries are kept: as `SWITCH` says, else `kernels` in the user's cache folder."""
    given = os.environ.get(SWITCH)
    return find_code_file(name, Path(given)) if given else find_code_file(f"{_KIND}/{name}")


def fault_of(library: Path) -> str | None:
    """Runs every kernel in a child process, once for a library, its self-test and a version of ONNX Runtime.

    Returns None for a library that works, else what is wrong; the result is kept beside the library.
    """
    versions = f"test-{_digest(_SELFTEST_FILE)}.ort-{ort.__version__}"
    record = code_file(f"{library.stem}-{_digest(library)}.{versions}.json")
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):  # none, or damaged
        known = json.loads(record.read_bytes())["fault"]
        if known is None or isinstance(known, str):
            return known
    fault = _run_selftest(library)
    try:
        write_file(record, json.dumps({"fault": fault}).encode())
    except OSError:
        _log.debug("the result of the kernels' self-test cannot be kept in %s", record.parent)
    return fault


def _is_changed(library: Path) -> bool:
    tried = [record.name for record in library.parent.glob(f"{library.stem}-*.json")]
    return bool(tried) and not any(name.startswith(f"{library.stem}-{_digest(library)}") for name in tried)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _run_selftest(library: Path) -> str | None:
    command = [sys.executable, "-m", SELFTEST, str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SELFTEST_S)
    except (OSError, subprocess.TimeoutExpired) as fault:
        return f"self-test: {fault}"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return f"self-test ended with {done.returncode}: {lines[-1] if lines else 'no message'}"[:500]


def prebuilt_folder() -> Path:
    """Returns where a wheel has its compiled libraries; in a checkout there is no such folder."""
    return Path(__file__).parents[2] / "cpu_kernels"


def _prebuilt() -> list[Path]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    features = cpu_features()
    files = [prebuilt_folder() / f"{v.name}.so" for v in VARIANTS if v.features <= features]
    return [file for file in files if file.is_file()]


def _compiled() -> tuple[Path | None, str]:
    sources, compiler = find_sources(), find_compiler()
    if sources is None or compiler is None:
        return None, "no C++ compiler" if sources else "no kernel sources"
    path = _path_of(sources, compiler)
    if not _is_kept(path):
        tell("compile the CPU kernels")
        with _locked(path.parent):
            if not _is_kept(path):
                _log.info("compiling the CPU kernels into %s", path)
                if fault := compile_library(sources, path, compiler, native_flags()):
                    return None, fault
    return path, ""


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a disk without locks: every process compiles its own
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _path_of(sources: Path, compiler: str) -> Path:
    parts = (sources_digest(sources), compiler, *FLAGS, *native_flags(), platform.machine(), *sorted(cpu_features()))
    return code_file(f"cpu-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so")


def _is_kept(path: Path) -> bool:
    return path.exists() and not _is_changed(path)


def is_compiled() -> bool:
    """Returns whether `find_library` has nothing to compile."""
    sources, compiler = find_sources(), find_compiler()
    if _is_off() or sources is None or compiler is None:
        return True
    return _has_best(_prebuilt()) or _is_kept(_path_of(sources, compiler))


def _is_off() -> bool:
    return os.environ.get(SWITCH, "").lower() == "off"


def _has_best(prebuilt: list[Path]) -> bool:
    return bool(prebuilt) and prebuilt[0].stem == VARIANTS[0].name


def _candidates() -> Iterator[tuple[Path | None, str]]:
    """Yields libraries, the best first: a wheel's best variant is as fast as one compiled here."""
    prebuilt = _prebuilt()
    is_best = _has_best(prebuilt)
    if is_best:
        yield prebuilt[0], ""
    yield _compiled()
    for file in prebuilt[1:] if is_best else prebuilt:
        yield file, ""


def find_library() -> Path | None:
    """Returns the library for this CPU, tried and ready; None where there is none, which is logged once."""
    return begin_search().result()


@functools.cache
def begin_search() -> Future[Path | None]:
    """Begins to look for the library in a thread, which compiles it where it must; returns its result to come."""
    pool = ThreadPoolExecutor(1, "kernels")
    found = pool.submit(_search)
    pool.shutdown(wait=False)
    return found


def _search() -> Path | None:
    if _is_off():
        return None
    faults = []
    for path, fault in _candidates():
        problem = fault if path is None else fault_of(path)
        if path is not None and problem is None:
            return path
        faults.append(f"{path.name}: {problem}" if path is not None else problem)
    _log.warning("no CPU kernels (%s): ONNX Runtime's own are used, which are slower", "; ".join(map(str, faults)))
    return None


def register_kernels(options: ort.SessionOptions) -> bool:
    """Registers the library in session options for the CPU; returns whether there is one."""
    library = find_library()
    if library is None:
        return False
    options.register_custom_ops_library(str(library))
    return True


def sequences_path(path: Path) -> Path:
    """Returns where the graph whose kernels are put together lies beside a graph: see `sequences.write_sequences`."""
    return path.with_suffix(".sequences.onnx")


def runnable_path(path: Path) -> Path:
    return found if (found := sequences_path(path)).is_file() else path
