# SPDX-License-Identifier: Apache-2.0
"""Digests of everything on which the result of a stage depends."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import platform
from collections.abc import Collection, Iterable
from importlib import metadata
from pathlib import Path

from speccompile.bundle.format import digest_from_file
from speccompile.core.race import SAMPLER_VERSION
from speccompile.version import VERSION

# Packages whose version may change a graph or a measurement.
_PACKAGES = ("numpy", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "torch", "transformers")


def versions_from_environment() -> dict[str, str]:
    """Returns the versions of Python, speccompile, its sampler and the packages a build depends on, where installed."""
    versions = {"python": platform.python_version(), "speccompile": VERSION}
    versions["sampler"] = str(SAMPLER_VERSION)
    found = ((name, _version(name)) for name in _PACKAGES)
    return versions | {name: version for name, version in found if version is not None}


@functools.cache
def _version(package: str) -> str | None:
    """Returns the version of an installed package, which is read once a process: a file each, 4 ms."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def digest_from_sources(packages: Iterable[str]) -> str:
    """Returns the SHA-256 over Python files of speccompile.

    Args:
        packages: subpackages or modules, e.g. "passes" or "core/specs".
    """
    root = Path(__file__).parents[1]
    total = hashlib.sha256()
    for package in sorted(packages):
        base = root / package
        for file in sorted(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")]:
            total.update(f"{file.relative_to(root)}\0{digest_from_file(file)}\n".encode())
    return total.hexdigest()


def digest_from_package(module: str, leave_out: Collection[str] = ()) -> str:
    """Returns the SHA-256 over the Python files of a module's package, wherever it is installed.

    Args:
        leave_out: names of excluded modules, e.g. "proposer".
    """
    package, total = module.rpartition(".")[0] or module, hashlib.sha256()
    spec = importlib.util.find_spec(package)
    assert spec is not None
    homes = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [(home, file) for home in homes for file in sorted(home.rglob("*.py"))]
    for home, file in files or [(Path(str(spec.origin)).parent, Path(str(spec.origin)))]:
        if file.stem not in leave_out:
            total.update(f"{package}/{file.relative_to(home)}\0{digest_from_file(file)}\n".encode())
    return total.hexdigest()
