# SPDX-License-Identifier: Apache-2.0
"""Faults of the disk: which of them a full disk gives, and their texts."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path

from speccompile.common.cache_root import VARIABLE, cache_root
from speccompile.errors import BuildError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_SHORT = re.compile(r"problem writing element \d+|\d+ requested and \d+ written")  # numpy's tofile, without an errno


def is_full(fault: OSError) -> bool:
    return fault.errno in _FULL or _is_short(fault)


def text_from_fault(fault: OSError) -> str:
    return "a write that stopped short, as on a full disk" if _is_short(fault) else fault.strerror or str(fault)


def error_from_fault(fault: OSError, dest: Path) -> BuildError:
    """Returns the error of a disk that is full or not writable; of the cache's, it says how to move or clear it."""
    # For a copy the first name was read, the second could not be written.
    path = Path(os.fsdecode(fault.filename2 or fault.filename or dest))
    todo = "Free space, or choose another folder." if is_full(fault) else "Choose a folder that can be written."
    with contextlib.suppress(BuildError):
        if Path(os.path.abspath(path)).is_relative_to(os.path.abspath(cache_root())):
            todo = f"Set {VARIABLE} to a folder on another disk."
            if is_full(fault):
                todo = f"Free space, run: speccompile cache clear, or set {todo[4:]}"
    expected = "a disk with room and permission to write"
    return BuildError(str(dest), f"{text_from_fault(fault)} at {path}", expected, todo)


def _is_short(fault: OSError) -> bool:
    return fault.errno is None and _SHORT.search(str(fault)) is not None
