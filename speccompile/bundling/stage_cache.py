# SPDX-License-Identifier: Apache-2.0
"""Results of stages by the digest of their inputs, so that an unchanged stage is not redone."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from speccompile.bundling.staging import copy_folder, disk_faults, remove_leftovers, staged_folder
from speccompile.errors import BundleError
from speccompile.runtime.bundle import check_files, digests_from_folder, read_json, write_json

_FOLDER, _FILES = "result", "files.json"
_DEFAULT_LIMIT_GIB = 40.0


def default_cache_folder() -> Path:
    """$SPECCOMPILE_CACHE, or ~/.cache/speccompile."""
    given = os.environ.get("SPECCOMPILE_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "speccompile"


class StageCache:
    """A folder of entries, `STAGE/KEY/result` with the digests of its files beside it.

    An entry appears whole or not at all and is verified when it is used: a damaged one is redone. Entries are
    copied, not linked, so that a bundle that someone edits does not reach the others.

    Args:
        root: the cache's folder; None redoes every stage.
        limit_bytes: the oldest entries go when the sum grows beyond it.
    """

    def __init__(self, root: Path | None, limit_bytes: int | None = None) -> None:
        gib = float(os.environ.get("SPECCOMPILE_CACHE_GIB", _DEFAULT_LIMIT_GIB))
        self.root, self.limit_bytes = root, int(gib * 2**30) if limit_bytes is None else limit_bytes

    def fetch(self, stage: str, key: str, dest: Path, make: Callable[[Path], None]) -> bool:
        """Fill the new folder `dest` from the entry of `key`, or with `make`, whose result is kept.

        Args:
            stage: name of the kind of result.
            key: digest of everything the result depends on.
            dest: does not exist yet; its parent does.
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
            entry.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(entry.parent)
        with staged_folder(entry) as folder:
            (folder / _FOLDER).mkdir()
            make(folder / _FOLDER)
            write_json(folder / _FILES, digests_from_folder(folder / _FOLDER))
            with disk_faults(dest):
                copy_folder(folder / _FOLDER, dest)
        self._evict()
        return False

    def _copy(self, entry: Path, dest: Path) -> bool:
        if not entry.is_dir():
            return False
        try:
            files = read_json(entry / _FILES)
            check_files(entry / _FOLDER, files)
            copy_folder(entry / _FOLDER, dest)
            os.utime(entry)
        except (BundleError, FileNotFoundError):
            # Damaged, or evicted by another build just now.
            shutil.rmtree(dest, ignore_errors=True)
            shutil.rmtree(entry, ignore_errors=True)
            return False
        return True

    def _evict(self) -> None:
        assert self.root is not None
        entries = [e for e in self.root.glob("*/*") if e.is_dir() and not e.name.startswith(".")]
        with contextlib.suppress(FileNotFoundError):
            entries.sort(key=lambda e: e.stat().st_mtime, reverse=True)
            total = 0
            for entry in entries:
                total += sum(f.stat().st_size for f in entry.rglob("*") if f.is_file())
                if total > self.limit_bytes:
                    shutil.rmtree(entry, ignore_errors=True)
