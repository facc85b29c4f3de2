# SPDX-License-Identifier: Apache-2.0
"""Folders that appear whole or not at all: written in a hidden sibling, flushed, renamed.

A hidden folder `.NAME.building-TOKEN` belongs to the process that holds the lock on its `.lock` file. The
kernel drops the lock when the process dies, however it dies, so a leftover is told from a running build
without trusting process numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from speccompile.errors import BuildError

_MARK = ".building-"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fs.h
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG}
)


@contextlib.contextmanager
def staged_folder(dest: Path) -> Iterator[Path]:
    """An empty hidden sibling of `dest`; takes its place when the block ends well, vanishes when it does not.

    An existing `dest` is exchanged in one step and then removed. Leftovers of dead builds of the same `dest`
    are removed first.

    Raises:
        BuildError: the disk is full, or the place cannot be written.
    """
    with disk_faults(dest):
        dest.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(dest.parent, dest.name)
        folder = dest.parent / f".{dest.name}{_MARK}{secrets.token_hex(4)}"
        with _locked(_lock_path(folder)):
            folder.mkdir()
            try:
                yield folder
                _flush(folder)
                _replace(folder, dest)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    _flush_folder(dest.parent)


@contextlib.contextmanager
def disk_faults(dest: Path) -> Iterator[None]:
    """Turn a full or forbidden disk into a BuildError that names `dest`; other faults of the system pass."""
    try:
        yield
    except OSError as fault:
        if fault.errno not in _FULL | _FORBIDDEN:
            raise
        is_full = fault.errno in _FULL
        todo = "Free space, or choose another folder." if is_full else "Choose a folder that can be written."
        got = f"{fault.strerror or fault} at {fault.filename or dest}"
        raise BuildError(str(dest), got, "a disk with room and permission to write", todo) from fault


def remove_leftovers(parent: Path, name: str | None = None) -> int:
    """Remove hidden folders of dead builds in `parent`, of `name` or of any; returns how many."""
    count = 0
    for folder in parent.glob(f".{name or '*'}{_MARK}*"):
        if folder.suffix == ".lock" or not folder.is_dir():
            continue
        with contextlib.suppress(BlockingIOError), _locked(_lock_path(folder)):
            shutil.rmtree(folder, ignore_errors=True)
            count += 1
    for lock in parent.glob(f".{name or '*'}{_MARK}*.lock"):
        with contextlib.suppress(BlockingIOError), _locked(lock):
            pass
    return count


def copy_folder(source: Path, dest: Path) -> None:
    """Copy all files into the new folder `dest`. Unlike shutil.copytree the first OSError is raised as it is."""
    for root, _, files in os.walk(source, onerror=_raise):
        place = dest / Path(root).relative_to(source)
        place.mkdir(parents=True)
        for name in files:
            shutil.copyfile(Path(root) / name, place / name)


def _raise(fault: OSError) -> None:
    raise fault


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; it is gone afterwards. BlockingIOError: a living process holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        # For people who look; the lock itself is what counts. A full disk must not hide behind it.
        with contextlib.suppress(OSError):
            os.write(handle, f"{os.getpid()}\n".encode())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _flush(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            handle = os.open(os.path.join(root, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        _flush_folder(Path(root))


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(folder: Path, dest: Path) -> None:
    """Put `folder` in the place of `dest`; what stood there is then found under the name of `folder`."""
    try:
        os.rename(folder, dest)  # nothing there, or an empty folder
    except OSError as fault:
        if fault.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange(folder, dest):
            # A file system without an exchange: for a moment there is no `dest`.
            old = folder.with_name(f"{folder.name}.old")
            os.rename(dest, old)
            os.rename(folder, dest)
            os.rename(old, folder)


def _exchange(first: Path, second: Path) -> bool:
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    paths = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    return bool(renameat2(*paths, _RENAME_EXCHANGE) == 0)
