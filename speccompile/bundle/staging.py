# SPDX-License-Identifier: Apache-2.0
"""Atomic folders: checked before the work begins, written in a hidden sibling, flushed, renamed.

`.NAME.building-TOKEN` belongs to the process with the lock on its `.lock` file, which the kernel drops when it dies.
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
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from speccompile.bundle.format import RUN, compare_folder, files_below, read_record
from speccompile.common.disk import error_from_fault, is_full
from speccompile.errors import BuildError

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

    An existing `dest` is exchanged in one step and then removed, leftovers of its dead builds first. Files of the user
    are not checked here: see `guard`.

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
        with _locked(_lock_path(folder), fcntl.LOCK_EX):  # others only have it for a moment, to find no folder
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
    """Removes hidden folders of dead builds in `parent`, of `name` or any; returns the number of builds.

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
def _locked(path: Path, operation: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> Iterator[None]:
    handle = _open_locked(path, operation)
    while not _is_at(handle, path):  # removed before it was locked
        os.close(handle)
        handle = _open_locked(path, operation)
    try:
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


def _open_locked(path: Path, operation: int) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, operation)
    except OSError:
        os.close(handle)
        raise
    return handle


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


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


_OTHER = "Choose another one."
_MAX_NAMES = 3  # of files in a message


@dataclass(frozen=True)
class Claim:
    """A folder that may be written: a new or empty one, or one of the same command to which nothing was added."""

    path: Path
    kind: str | None  # of the folders that may be replaced there; None: nothing is
    seen: frozenset[tuple[str, int, int, int]]  # (path, inode, bytes, time of change) of its files at the check

    def hold(self) -> None:
        """Check again, right before the folder is replaced."""
        if self.path.is_file() or _see(self.path) != self.seen:
            _check_contents(self.path, self.kind)


def claim_folder(dest: Path, kind: str | None = None) -> Claim:
    """Checks that a folder may be written: an empty one, or an earlier one of `kind` (see `records`; None: none)."""
    with disk_faults(dest):
        path = resolve_path(dest)
        if is_mount(path):
            raise BuildError(str(dest), "a mount point", "a folder that can be replaced", "Choose a folder inside it.")
        check_home(path, dest)
        if os.path.lexists(path) and not path.is_dir():
            raise BuildError(str(dest), f"{_kind_of(path)} that is there already", "a folder, or nothing", _OTHER)
        with contextlib.suppress(FileNotFoundError):
            if Path.cwd().is_relative_to(path) and path.exists():
                got = "the folder that this command runs in, or one above it"
                raise BuildError(str(dest), got, "a folder that can be replaced", "Run the command from outside of it.")
        with contextlib.suppress(FileNotFoundError):
            staging_path(path).lstat()  # a name that is too long is noticed here
        seen = _see(path)
        _check_contents(path, kind)
        return Claim(path, kind, seen)


def check_home(path: Path, shown: Path) -> None:
    """Checks the folders above a path. Raises BuildError: they cannot be written, or speccompile wrote one."""
    parents = [parent for parent in path.parents if os.path.lexists(parent)]
    if parents and not parents[0].is_dir():
        raise BuildError(str(shown), f"{parents[0]}, which is {_kind_of(parents[0])}", "a folder", _OTHER)
    if not parents or not os.access(parents[0], os.W_OK | os.X_OK):
        got, todo = f"no permission to write in {path.parent}", "Choose a folder that can be written."
        raise BuildError(str(shown), got, "a disk with room and permission to write", todo)
    for parent in parents:
        record = read_record(parent)
        if record is not None and record.kind != RUN:
            got = f"a path inside {parent}, a {record.kind} that speccompile wrote"
            raise BuildError(str(shown), got, "a path outside of it", "Choose a path beside it.")


def check_names(folder: Path, names: Iterable[str], kind: str) -> None:
    """Checks that files of `names` in a folder are new or recorded as of `kind`. Raises BuildError: they are not."""
    with disk_faults(folder):
        if os.path.lexists(folder) and not folder.is_dir():
            raise BuildError(str(folder), _kind_of(folder), "a folder, or nothing", f"Move it away. {_OTHER}")
        record = read_record(folder)
        found = [name for name in names if os.path.lexists(folder / name)]
        if found and (record is None or record.kind != kind):
            got = f"{_listed(found)}, which speccompile did not write"
            todo = f"Move {folder} away, or choose another output."
            raise BuildError(str(folder), got, f"the folder of a {kind}, or nothing", todo)


def resolve_path(path: Path) -> Path:
    """Returns the absolute path with every link followed."""
    try:
        return Path(os.path.realpath(path))
    except FileNotFoundError as fault:
        todo = "Change to another folder."
        raise BuildError(str(path), "a working folder that was removed", "one that exists", todo) from fault


def _check_contents(path: Path, kind: str | None) -> None:
    if not path.is_dir():
        if os.path.lexists(path):
            raise BuildError(str(path), f"{_kind_of(path)} that is there already", "a folder, or nothing", _OTHER)
        return
    record = read_record(path)
    if record is not None and record.kind != kind:
        expected = "a new or empty folder" if kind is None else f"a {kind} to replace, or nothing"
        raise BuildError(str(path), f"a {record.kind}", expected, "Remove it, or choose another folder.")
    difference = compare_folder(path, record)
    if record is None and difference.foreign:
        expected = "a new or empty folder" if kind is None else f"a {kind} to replace, or nothing"
        got = f"a folder with other things in it: {_listed(difference.foreign)}"
        raise BuildError(str(path), got, expected, "Choose another folder.")
    if difference.foreign:
        got = f"files in it that speccompile did not write: {_listed(difference.foreign)}"
        raise BuildError(str(path), got, "its own files alone", "Move them away, or choose another folder.")
    if difference.changed:
        got = f"files in it that were changed since speccompile wrote them: {_listed(difference.changed)}"
        todo = f"Copy what you want to keep and remove {path}, or choose another folder."
        raise BuildError(str(path), got, "its files as they were written", todo)


def _see(path: Path) -> frozenset[tuple[str, int, int, int]]:
    if not path.is_dir():
        return frozenset()
    facts = ((name, file.lstat()) for name, file in files_below(path))
    return frozenset((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in facts)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _kind_of(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except OSError:
        return "a link that leads nowhere"
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFREG: "a file", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
