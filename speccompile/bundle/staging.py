# SPDX-License-Identifier: Apache-2.0
"""Atomic folders: written in a hidden sibling, flushed, renamed.

A hidden folder `.NAME.building-TOKEN` belongs to the process that holds the lock on its `.lock` file. The
kernel drops the lock when the process dies, however it dies, so a leftover is distinguished from a
running build without relying on process ids.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from speccompile.common.disk import error_from_fault, is_full

_MARK = ".building-"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fs.h
_FORBIDDEN = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
        *(errno.ENAMETOOLONG, errno.ELOOP, errno.EBUSY, errno.EXDEV),
    }
)


@contextlib.contextmanager
def staged_folder(dest: Path, check: Callable[[], None] | None = None, *, keeps_others: bool = False) -> Iterator[Path]:
    """Yields an empty hidden sibling of `dest`, which replaces it when the block succeeds and is removed otherwise.

    An existing `dest` is exchanged in one step and then removed. Leftovers of dead builds of the same `dest`
    are removed first. Files of the user are not checked here: see `guard`.

    Args:
        check: called right before the exchange; where it raises, `dest` is unchanged.
        keeps_others: exchange the folders in `dest` that were written, one by one, and keep the others.

    Raises:
        BuildError: the disk is full, or the folder cannot be written.
    """
    with disk_faults(dest):
        dest.parent.mkdir(parents=True, exist_ok=True)
        folder = staging_path(dest)
        if keeps_others and dest.is_dir() and (is_mount(dest) or not os.access(dest.parent, os.W_OK | os.X_OK)):
            folder = dest / folder.name  # siblings are on another disk, or not writable
        remove_leftovers(folder.parent, dest.name)
        with _locked(_lock_path(folder)):
            folder.mkdir()
            try:
                yield folder
                _flush(folder)
                if check is not None:
                    check()
                if keeps_others and dest.is_dir():
                    for child in sorted(folder.iterdir()):
                        _replace(child, dest / child.name)
                    _flush_folder(dest)
                else:
                    _replace(folder, dest)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        _flush_folder(dest.parent)


def staging_path(dest: Path) -> Path:
    return dest.with_name(f".{dest.name}{_MARK}{secrets.token_hex(4)}")


def is_mount(path: Path) -> bool:
    """Whether something is mounted at a path, even a folder of the same disk: a rename cannot replace it."""
    if os.path.ismount(path):
        return True
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    escaped = re.sub(rb"[ \t\n\\]", lambda m: b"\\%03o" % m[0][0], os.fsencode(path))
    return any(line.split(b" ")[4] == escaped for line in mounts)


@contextlib.contextmanager
def disk_faults(dest: Path) -> Iterator[None]:
    """Turn a full or forbidden disk into a BuildError that names `dest`; other system errors pass."""
    try:
        yield
    except OSError as fault:
        if not is_full(fault) and fault.errno not in _FORBIDDEN:
            raise
        raise error_from_fault(fault, dest) from fault


def remove_leftovers(parent: Path, name: str | None = None) -> int:
    """Remove hidden folders of dead builds in `parent`, of `name` or of any; returns the number of builds.

    A folder that such a build had moved aside and not yet replaced is put back.
    """
    pattern = re.compile(
        rf"(\.({re.escape(name) if name else '.+'}){re.escape(_MARK)}[0-9a-f]{{8}})(\.old|(\.old)?\.lock)?"
    )
    found = filter(None, (pattern.fullmatch(entry) for entry in os.listdir(parent)))
    count = 0
    for build, dest in sorted({(match[1], match[2]) for match in found}):
        folder = parent / build
        with contextlib.suppress(BlockingIOError), _locked(_lock_path(folder)):
            old = _old_path(folder)
            if old.is_dir() and not os.path.lexists(parent / dest):
                os.rename(old, parent / dest)
            left = [path for path in (folder, old) if path.is_dir()]
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
            count += bool(left)
    return count


def copy_folder(source: Path, dest: Path) -> None:
    """Copy all files into the new folder `dest`. Unlike shutil.copytree it raises the first OSError unchanged."""
    for root, _, files in os.walk(source, onerror=_raise):
        folder = dest / Path(root).relative_to(source)
        folder.mkdir(parents=True)
        for name in files:
            shutil.copyfile(Path(root) / name, folder / name)


def _raise(fault: OSError) -> None:
    raise fault


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _old_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.old")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        # For information only; only the lock itself counts. A full disk must not be reported here.
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
    try:
        os.rename(folder, dest)  # no folder there, or an empty one
    except OSError as fault:
        if fault.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange(folder, dest):
            # A file system without an exchange: for a moment there is no `dest`.
            old = _old_path(folder)
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
