# SPDX-License-Identifier: Apache-2.0
"""Entries of the cache's folder: listed by kind, and removed. Only files of speccompile count as entries."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from speccompile.bundle.stage_cache import is_stage_entry
from speccompile.bundle.staging import disk_faults, remove_leftovers

_DIGEST = re.compile(r"(.*-)?[0-9a-f]{8,64}")
# Single files by kind: measurements of a machine, and kernels compiled for a GPU or a CPU with results of self-tests.
_FILES = {"tuning": (".json",), "kernels": (".ptx", ".cubin", ".so", ".json"), "tensorrt": (".timings", ".kernels")}
GGUF = "gguf"  # folders of checkpoints that are links to GGUF files


@dataclass(frozen=True)
class CacheEntry:
    """One kept result.

    Args:
        kind: e.g. "graphs" or "training/states".
        used_s: time of creation or last use, seconds since the epoch.
    """

    kind: str
    path: Path
    size_bytes: int
    used_s: float


def list_entries(root: Path) -> list[CacheEntry]:
    """Returns the entries of a cache, the least recently used first; none where there is no such folder."""
    found = []
    for kind, path in _find(root):
        try:
            files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
            size = sum(file.stat().st_size for file in files)
            found.append(CacheEntry(kind, path, size, path.stat().st_mtime))
        except FileNotFoundError:  # removed by a build in the meantime
            continue
    return sorted(found, key=lambda entry: entry.used_s)


def remove_entries(root: Path, entries: Iterable[CacheEntry]) -> int:
    """Removes entries, and leftovers of dead builds in the folders of stages; returns the bytes freed.

    Raises:
        BuildError: an entry cannot be removed.
    """
    freed = 0
    for entry in entries:
        with disk_faults(entry.path):
            if entry.path.is_dir():
                shutil.rmtree(entry.path)
            else:
                entry.path.unlink(missing_ok=True)
        freed += entry.size_bytes
    for folder in root.glob("*"):
        if folder.is_dir() and not folder.is_symlink():
            remove_leftovers(folder)
    return freed


def _find(root: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(root.glob("*/*")):
        kind = path.parent.name
        is_file = path.suffix in _FILES.get(kind, ()) and path.is_file() and _DIGEST.fullmatch(path.stem)
        is_folder = kind == GGUF and path.is_dir() and _DIGEST.fullmatch(path.name)
        if is_file or is_folder or is_stage_entry(path):
            yield kind, path
    for path in sorted(root.glob("training/*/*")):
        if path.is_dir() and _DIGEST.fullmatch(path.name):
            yield f"training/{path.parent.name}", path
