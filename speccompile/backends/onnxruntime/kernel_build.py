# SPDX-License-Identifier: Apache-2.0
"""Compiling the library of CPU kernels; the standard library alone, as the build of the wheel loads this file too."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-gnu-unique"),
    *("-fPIC", "-fvisibility=hidden", "-Wno-psabi"),
)
_COMPILE_S = 600


@dataclass(frozen=True)
class Variant:
    """The library for CPUs that have certain instruction sets."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]  # names in /proc/cpuinfo of those that the code needs


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
# Those in the wheel, best first.
VARIANTS = (
    Variant(
        "avx512-vnni",
        ("-march=x86-64-v4", "-mavx512vnni"),
        _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"},
    ),
    Variant("x86-64-v3", ("-march=x86-64-v3",), _V3),
)


def cpu_features() -> frozenset[str]:
    """Returns the instruction sets that this CPU has, by the kernel's names; empty where it does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":") for line in lines)
    return frozenset(next((text.split() for key, _, text in named if key.strip() in ("flags", "Features")), []))


def find_compiler() -> str | None:
    """Returns the C++ compiler: $CXX, else c++, g++ or clang++ on the PATH; None where there is none."""
    given = os.environ.get("CXX")
    return next((found for name in (given, "c++", "g++", "clang++") if name and (found := shutil.which(name))), None)


def native_flags() -> tuple[str, ...]:
    return ("-march=native",) if platform.machine() in ("x86_64", "AMD64") else ("-mcpu=native",)


def sources_digest(folder: Path) -> str:
    """Returns the SHA-256 of the sources and their names."""
    digest = hashlib.sha256()
    for path in sorted((*folder.glob("*.h"), *folder.glob("*.cpp"))):
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def compile_library(sources: Path, dest: Path, compiler: str, target: Sequence[str]) -> str | None:
    """Compiles the library with a C++17 compiler, file by file; returns None, or the compiler's first errors."""
    files = sorted(sources.glob("*.cpp"))
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=dest.parent) as scratch,
            ThreadPoolExecutor(min(len(files), os.cpu_count() or 1)) as pool,
        ):
            objects = [Path(scratch) / f"{file.stem}.o" for file in files]
            flags = (compiler, *FLAGS, *target)
            jobs = [(*flags, "-c", str(file), "-o", str(part)) for file, part in zip(files, objects, strict=True)]
            made = Path(scratch) / dest.name
            link = (*flags, "-shared", *map(str, objects), "-o", str(made))
            fault = next(filter(None, pool.map(_run, jobs)), None)
            pool.shutdown(cancel_futures=True)  # after a fault the others' work is of no use
            fault = fault or _run(link)
            if fault is None:
                made.chmod(0o600)
                made.replace(dest)
            return fault
    except (OSError, subprocess.TimeoutExpired) as fault:
        return f"{compiler}: {fault}"


def _run(command: Sequence[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_S)
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    return " | ".join(errors[:3])[:500] or f"{command[0]} ended with {done.returncode}"
