# SPDX-License-Identifier: Apache-2.0
"""Atomic files: written beside, flushed, renamed. Pipes and devices are written directly."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from pathlib import Path

from speccompile.bundle.staging import check_home, disk_faults, resolve_path
from speccompile.errors import BuildError

_REGULAR, _STREAMS = stat.S_IFREG, {stat.S_IFCHR, stat.S_IFIFO}
_REFUSED = {stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a block device"}


def check_file(path: Path, *, makes_folder: bool = False) -> None:
    """Checks that a file can be written, before the work on its content: nothing yet, a file, pipe or character device.

    Raises:
        BuildError: a folder, a socket or a disk; no folder that can be written; or a folder that speccompile wrote.
    """
    with disk_faults(path):
        kind = _kind(path)
        if kind in _REFUSED:
            raise BuildError(str(path), _REFUSED[kind], "a file, or nothing", "Choose another file.")
        if kind in _STREAMS:
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return
        real = resolve_path(path)
        if not makes_folder and not real.parent.is_dir():
            got, todo = f"no folder {real.parent}", "Make the folder, or choose another file."
            raise BuildError(str(path), got, "a file in a folder that exists", todo)
        check_home(real, path)
        if kind == _REGULAR and not os.access(real, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        with contextlib.suppress(FileNotFoundError):
            _part(real).lstat()  # a name that is too long is noticed here


def write_file(path: Path, text: str, *, makes_folder: bool = False) -> None:
    """Write a text file; see `check_file` for what it may be."""
    check_file(path, makes_folder=makes_folder)
    with disk_faults(path):
        if _kind(path) in _STREAMS:
            with open(os.open(path, os.O_WRONLY), "w", encoding="utf-8") as stream:
                stream.write(text)
            return
        real = resolve_path(path)
        real.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(real)
        _replace_file(real, text.encode())


def _kind(path: Path) -> int | None:
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return None


def _replace_file(path: Path, data: bytes) -> None:
    part = _part(path)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it belongs to a living process
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(handle, stat.S_IMODE(path.stat().st_mode))
        with open(handle, "wb", closefd=False) as file:
            file.write(data)
        os.fsync(handle)
        try:
            os.replace(part, path)
        except OSError as fault:
            if fault.errno != errno.EBUSY:
                raise
            path.write_bytes(data)  # a mounted file cannot be replaced by a rename
    finally:
        part.unlink(missing_ok=True)
        os.close(handle)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def _remove_leftovers(path: Path) -> None:
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.part")
    for name in filter(pattern.fullmatch, os.listdir(path.parent)):
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            handle = os.open(path.with_name(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.with_name(name).unlink()
            finally:
                os.close(handle)
