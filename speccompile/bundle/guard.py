# SPDX-License-Identifier: Apache-2.0
"""One guard for every folder and file that a command writes at a path of the user, checked before the work begins.

The rule: a folder is written where there is none or an empty one, or where the same command wrote one before and no
file was added or changed since. Anything else is refused. A link is followed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from speccompile.bundle.folder_records import RUN, compare_folder, files_below, read_record
from speccompile.bundle.staging import disk_faults, is_mount, staging_path
from speccompile.errors import BuildError

_OTHER = "Choose another one."
_MAX_NAMES = 3  # of files in a message


@dataclass(frozen=True)
class Claim:
    """A folder that may be written.

    Args:
        kind: of the folders that may be replaced there; None: nothing is.
        seen: (path, inode, bytes, time of change) of its files at the check.
    """

    path: Path
    kind: str | None
    seen: frozenset[tuple[str, int, int, int]]

    def hold(self) -> None:
        """Check again, right before the folder is replaced.

        Raises:
            BuildError: files were added since.
        """
        if self.path.is_file() or _see(self.path) != self.seen:
            _check_contents(self.path, self.kind)


def claim_folder(dest: Path, kind: str | None = None) -> Claim:
    """Check that a folder may be written, or replaced.

    Args:
        kind: see `records`; an earlier folder of that kind may be replaced. None: only an empty one.

    Raises:
        BuildError: it may not; the message names the obstacle.
    """
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
    """Check the folders above a path that will be written.

    Raises:
        BuildError: the folders above cannot be written, or one of them was written by speccompile.
    """
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
    """Check that files can be replaced in a folder that may contain others.

    Raises:
        BuildError: it has a file of one of `names`, and no record of that kind.
    """
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
    """Returns the absolute path with every link followed.

    Raises:
        BuildError: it is relative to a working folder that was removed.
    """
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
