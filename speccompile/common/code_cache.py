# SPDX-License-Identifier: Apache-2.0
"""Compiled code kept between runs: only a file that nobody but root and the running user can change is loaded.

Instead of a folder of the cache that others can write, one below the system's folder for temporary files is used.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from speccompile.common.cache_root import cache_root, make_folders
from speccompile.errors import BuildError

_log = logging.getLogger(__name__)


def find_code_file(name: str, root: Path | None = None) -> Path:
    """Returns where compiled code is, or is to be written, in the user's `root` or the cache; it may be loaded."""
    if root is None:
        with contextlib.suppress(BuildError):  # no home folder
            root = cache_root()
    private = Path(tempfile.gettempdir()) / f"speccompile-{os.geteuid()}"
    faults = []
    for base in (private,) if root is None else (root, private):
        try:
            file = _usable_file(base, name)
        except OSError as fault:
            faults.append(f"{fault.filename or base}: {fault.strerror or fault}")
            continue
        if faults:
            todo = "Remove what others can write, or set SPECCOMPILE_CACHE to a folder of your own."
            _log.warning("compiled code is kept in %s (%s). %s", base, "; ".join(faults), todo)
        return file
    passing = Path(tempfile.mkdtemp(prefix="speccompile-"))
    atexit.register(shutil.rmtree, passing, ignore_errors=True)
    _log.warning("compiled code is made for this process alone (%s)", "; ".join(faults))
    return passing / Path(name).name


def write_file(file: Path, data: bytes) -> None:
    """Writes a file that only the user can read and write; another process sees the old one or the new one."""
    make_folders(file.parent)
    handle, fresh = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with open(handle, "wb") as stream:
            stream.write(data)
        os.replace(fresh, file)
    except OSError:
        Path(fresh).unlink(missing_ok=True)
        raise


def _usable_file(base: Path, name: str) -> Path:
    """Returns the file below `base`, which is there and may be loaded, or is not there and can be written."""
    _check_way(base)
    base = base.resolve()
    file = base / name
    make_folders(file.parent)
    for folder in file.parents:
        if folder.is_relative_to(base):
            _check_own(folder, stat.S_ISDIR)
    with contextlib.suppress(FileNotFoundError):
        try:
            _check_own(file, stat.S_ISREG)
            return file
        except PermissionError as fault:
            file.unlink()
            _log.warning("%s was not loaded (%s): it is removed and made anew", file, fault.strerror)
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise PermissionError(0, "no permission to write", str(file.parent))
    return file


def _check_way(base: Path) -> None:
    """Raises PermissionError where a user outside the own group can put another folder in the place of `base`."""
    owners = (0, os.geteuid(), os.stat("/").st_uid)  # inside a user namespace, "/" may seem another's
    given, real = Path(os.path.abspath(base)), Path(os.path.realpath(base))
    for step in (given, *given.parents, *real.parents):
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(step)
            if found.st_uid not in owners:
                raise PermissionError(0, f"owned by user {found.st_uid}", str(step))
            others = stat.S_IWOTH if found.st_gid == os.getegid() else stat.S_IWOTH | stat.S_IWGRP
            is_open = found.st_mode & others and not found.st_mode & stat.S_ISVTX
            if is_open and step != given and not stat.S_ISLNK(found.st_mode):
                raise PermissionError(0, "writable by others", str(step))


def _check_own(path: Path, is_kind: Callable[[int], bool]) -> None:
    found = os.lstat(path)
    if not is_kind(found.st_mode):
        raise PermissionError(0, "a link" if stat.S_ISLNK(found.st_mode) else "of another kind", str(path))
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(0, f"owned by user {found.st_uid}", str(path))
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(0, "writable by others", str(path))
