# SPDX-License-Identifier: Apache-2.0
"""The user's cache folder: $SPECCOMPILE_CACHE, or ~/.cache/speccompile."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from speccompile.errors import BuildError

VARIABLE = "SPECCOMPILE_CACHE"
_TODO = f"Set {VARIABLE} to a folder that can be written."
_log = logging.getLogger(__name__)


def cache_root() -> Path:
    """Returns the cache's folder, if it is there or not. Raises BuildError: neither `VARIABLE` nor a home folder."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(os.path.expanduser(given))
    try:
        return Path.home() / ".cache" / "speccompile"
    except RuntimeError as fault:
        raise BuildError(VARIABLE, "no value, and no home folder of this user", "a folder", _TODO) from fault


def make_cache_folder(name: str = "") -> Path:
    """Returns a folder of the cache, or the cache's own, made if need be. Raises BuildError: it cannot be written."""
    root = cache_root()
    folder = root / name
    try:
        make_folders(folder)
    except OSError as fault:
        raise _error(root, folder, fault.strerror or str(fault)) from fault
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _error(root, folder, "no permission to write")
    return folder


def make_folders(folder: Path) -> None:
    """Makes a folder and those above it where they are not there; nobody else can read or write in them."""
    for path in reversed((folder, *folder.parents)):
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)


def find_cache_folder(name: str) -> Path | None:
    """Returns a folder of the cache for what can be done without it; None, logged, where the default one is unusable.

    Raises:
        BuildError: `VARIABLE` names a folder that cannot be used.
    """
    try:
        return make_cache_folder(name)
    except BuildError as fault:
        if os.environ.get(VARIABLE):
            raise
        _log.warning("nothing is kept for the next start: %s", fault)
        return None


def _error(root: Path, folder: Path, reason: str) -> BuildError:
    in_the_way = next((p for p in (folder, *folder.parents) if p.is_file()), None)
    got = f"a file at {in_the_way}" if in_the_way is not None else f"{reason} at {folder}"
    where = VARIABLE if os.environ.get(VARIABLE) else f"the cache folder {root}"
    return BuildError(where, got, "a folder in which files can be written", _TODO)
