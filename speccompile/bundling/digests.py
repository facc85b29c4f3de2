# SPDX-License-Identifier: Apache-2.0
"""What the outcome of a stage depends on, as one digest."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Collection, Iterable
from importlib import metadata
from pathlib import Path

import speccompile
from speccompile.runtime.bundle import digest_from_file

# Packages whose version changes a graph or a measurement.
_PACKAGES = ("numpy", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "torch", "transformers")


def versions_from_environment() -> dict[str, str]:
    """Versions of Python, of speccompile and of the packages a build depends on; those not installed are left out."""
    versions = {"python": platform.python_version(), "speccompile": speccompile.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def digest_from_sources(packages: Iterable[str], leave_out: Collection[str] = ()) -> str:
    """SHA-256 over Python files of speccompile.

    Args:
        packages: subpackages or modules, e.g. "passes" or "core/specs".
        leave_out: names of modules that do not count in a subpackage, e.g. "proposer".
    """
    root = Path(speccompile.__file__).parent
    total = hashlib.sha256()
    for package in sorted(packages):
        base = root / package
        for file in sorted(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")]:
            if base.is_dir() and file.stem in leave_out:
                continue
            total.update(f"{file.relative_to(root)}\0{digest_from_file(file)}\n".encode())
    return total.hexdigest()
