# SPDX-License-Identifier: Apache-2.0
"""Stages of a build: their seconds and memory, and results by the digest of their inputs, so that none is redone."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speccompile.backends.machine import read_peak_rss, reset_peak_rss
from speccompile.bundle.format import MANIFEST, check_files, digests_from_folder, read_json, write_json
from speccompile.bundle.staging import copy_folder, disk_faults, remove_leftovers, staged_folder
from speccompile.common.cache_root import make_folders
from speccompile.errors import BuildError, BundleError

_FOLDER, _FILES = "result", "files.json"
BUNDLES = "bundles"  # the kind of entries that are whole bundles, see `speccompile.prepare`
_DEFAULT_LIMIT_GIB = 40.0
_log = logging.getLogger(__name__)


def cache_limit_bytes() -> int:
    """Returns $SPECCOMPILE_CACHE_GIB in bytes, or 40 GiB."""
    given = os.environ.get("SPECCOMPILE_CACHE_GIB", "")
    try:
        gib = float(given) if given.strip() else _DEFAULT_LIMIT_GIB
    except ValueError:
        gib = -1.0
    if not 0.0 <= gib < float("inf"):
        todo = "Write a number, e.g. SPECCOMPILE_CACHE_GIB=10, or leave it out."
        raise BuildError("SPECCOMPILE_CACHE_GIB", repr(given), "a number of GiB, 0 or above", todo)
    return int(gib * 2**30)


def is_stage_entry(path: Path) -> bool:
    """Whether `StageCache.fetch` or `prepare` wrote it: users choose the cache's folder, and may keep files there."""
    if path.parent.name == BUNDLES:
        return (path / MANIFEST).is_file()
    return (path / _FILES).is_file() and (path / _FOLDER).is_dir()


class StageCache:
    """A folder of entries, `STAGE/KEY/result` with the digests of its files beside it.

    An entry is written atomically and verified when it is used: a damaged one is redone. Entries are copied, not
    linked, so that editing one bundle does not change the others.

    Args:
        root: the cache's folder; None redoes every stage.
        limit_bytes: the oldest entries are removed when their sum exceeds it.
    """

    def __init__(self, root: Path | None, limit_bytes: int | None = None) -> None:
        self.root, self.limit_bytes = root, cache_limit_bytes() if limit_bytes is None else limit_bytes

    def fetch(self, stage: str, key: str, dest: Path, make: Callable[[Path], None]) -> bool:
        """Fills the new folder `dest` from the entry of `key`, or by `make`; returns whether it was cached."""
        if self.root is None:
            dest.mkdir(parents=True)
            make(dest)
            return False
        entry = self.root / stage / key
        if self._copy(entry, dest):
            return True
        with disk_faults(entry):
            make_folders(entry.parent)
            remove_leftovers(entry.parent)
        with staged_folder(entry) as folder:
            (folder / _FOLDER).mkdir()
            make(folder / _FOLDER)
            write_json(folder / _FILES, digests_from_folder(folder / _FOLDER))
            with disk_faults(dest):
                copy_folder(folder / _FOLDER, dest)
        self._evict()
        return False

    def forget(self, stage: str, key: str) -> None:
        """Removes the entry of `key`, so that the stage is done again the next time."""
        if self.root is not None:
            shutil.rmtree(self.root / stage / key, ignore_errors=True)

    def _copy(self, entry: Path, dest: Path) -> bool:
        if not entry.is_dir():
            return False
        try:
            files = read_json(entry / _FILES)
            check_files(entry / _FOLDER, files)
            copy_folder(entry / _FOLDER, dest)
            with contextlib.suppress(PermissionError):
                os.utime(entry)
        except (BundleError, FileNotFoundError) as fault:
            # Damaged, or just evicted by another build.
            _log.warning("the cache's entry %s is removed and its stage done again: %s", entry, fault)
            shutil.rmtree(dest, ignore_errors=True)
            shutil.rmtree(entry, ignore_errors=True)
            return False
        return True

    def _evict(self) -> None:
        assert self.root is not None
        entries = [path for path in self.root.glob("*/*") if is_stage_entry(path)]
        with contextlib.suppress(FileNotFoundError):
            entries.sort(key=lambda e: e.stat().st_mtime, reverse=True)
            total = 0
            for entry in entries:
                total += sum(f.stat().st_size for f in entry.rglob("*") if f.is_file())
                if total > self.limit_bytes:
                    _log.info("the cache holds more than %d bytes: %s is removed", self.limit_bytes, entry)
                    shutil.rmtree(entry, ignore_errors=True)


_DIGEST = re.compile(r"(.*-)?[0-9a-f]{8,64}")
# Single files by kind: measurements of a machine, and kernels compiled for a GPU or a CPU with results of self-tests.
_KEPT_FILES = {
    "tuning": (".json",),
    "machines": (".json",),
    "kernels": (".ptx", ".cubin", ".so", ".json"),
    "tensorrt": (".timings", ".kernels"),
}
GGUF = "gguf"  # folders of checkpoints that are links to GGUF files


@dataclass(frozen=True)
class CacheEntry:
    """One kept result. `kind`: e.g. "graphs" or "training/states"."""

    kind: str
    path: Path
    size_bytes: int
    used_s: float  # time of creation or last use, seconds since the epoch


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
    """Removes entries, and leftovers of dead builds in the folders of stages; returns the bytes freed."""
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
        is_file = path.suffix in _KEPT_FILES.get(kind, ()) and path.is_file() and _DIGEST.fullmatch(path.stem)
        is_folder = kind == GGUF and path.is_dir() and _DIGEST.fullmatch(path.name)
        if is_file or is_folder or is_stage_entry(path):
            yield kind, path
    for path in sorted(root.glob("training/*/*")):
        if path.is_dir() and _DIGEST.fullmatch(path.name):
            yield f"training/{path.parent.name}", path


Progress = Callable[[str], None]


@dataclass
class Stage:
    """A stage while it runs; all but its name are set inside its block."""

    name: str
    cached: bool = False
    joint_peak_bytes: int = 0  # the most memory of this process and one that it started together
    skipped: str | None = None
    note: str | None = None


@dataclass
class StageLog:
    """Collects time and memory of the stages.

    Args:
        progress: called with "STAGE" as a stage begins and "STAGE: STEP" for the steps inside it; "STAGE: cached" and
            "STAGE: not run: REASON" report how it ended.
        rows: {"name", "seconds", "peak_rss_bytes", "cached"} of the finished stages, in order; "skipped" is the reason
            where nothing was done, "note" a remark. The peak includes a process that the stage started.
    """

    progress: Progress
    rows: list[dict[str, Any]] = field(default_factory=list)
    current: str = ""

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Measure a block."""
        stage, self.current = Stage(name), name
        self.progress(name)
        reset_peak_rss()
        start = time.perf_counter()
        yield stage
        seconds = round(time.perf_counter() - start, 3)
        peak = max(read_peak_rss(), stage.joint_peak_bytes)
        row = {"name": name, "seconds": seconds, "peak_rss_bytes": peak, "cached": stage.cached}
        if stage.skipped is not None:
            self.progress(f"{name}: not run: {stage.skipped}")
            row["skipped"] = stage.skipped
        row |= {} if stage.note is None else {"note": stage.note}
        self.rows.append(row)
        _log.info("%s: %.1f s%s", name, seconds, f", not run: {stage.skipped}" if stage.skipped else "")

    def skip(self, *names: str) -> None:
        for name in names:
            self.progress(f"{name}: cached")
            self.rows.append({"name": name, "seconds": 0.0, "peak_rss_bytes": read_peak_rss(), "cached": True})

    def leave_out(self, name: str, why: str) -> None:
        self.progress(f"{name}: not run: {why}")
        row = {"name": name, "seconds": 0.0, "peak_rss_bytes": read_peak_rss(), "cached": False, "note": why}
        self.rows.append(row)

    def step(self, name: str) -> None:
        self.progress(f"{self.current}: {name}")
