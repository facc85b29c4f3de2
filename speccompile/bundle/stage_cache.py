# SPDX-License-Identifier: Apache-2.0
"""Results of stages by the digest of their inputs, so that an unchanged stage is not redone."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from speccompile.bundle.format import MANIFEST, check_files, digests_from_folder, read_json, write_json
from speccompile.bundle.staging import copy_folder, disk_faults, remove_leftovers, staged_folder
from speccompile.common.cache_root import make_folders
from speccompile.errors import BuildError, BundleError

_FOLDER, _FILES = "result", "files.json"
BUNDLES = "bundles"  # the kind of entries that are whole bundles, see `speccompile.prepare`
_DEFAULT_LIMIT_GIB = 40.0
_log = logging.getLogger(__name__)


def cache_limit_bytes() -> int:
    """Returns $SPECCOMPILE_CACHE_GIB in bytes, or 40 GiB.

    Raises:
        BuildError: it is no number of GiB.
    """
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
        """Fill the new folder `dest` from the entry of `key`, or with `make`, whose result is kept.

        Args:
            make: writes the result into an existing empty folder.

        Returns:
            Whether it came from the cache.

        Raises:
            BuildError: the disk is full.
        """
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
