# SPDX-License-Identifier: Apache-2.0
"""Faults of the disk: which of them a full disk gives, and their texts."""

from __future__ import annotations

import errno
import re

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_SHORT = re.compile(r"problem writing element \d+|\d+ requested and \d+ written")  # numpy's tofile, without an errno


def is_full(fault: OSError) -> bool:
    """Returns whether a fault is what a full disk gives."""
    return fault.errno in _FULL or _is_short(fault)


def text_from_fault(fault: OSError) -> str:
    """Returns what happened, without the file's name."""
    return "a write that stopped short, as on a full disk" if _is_short(fault) else fault.strerror or str(fault)


def _is_short(fault: OSError) -> bool:
    return fault.errno is None and _SHORT.search(str(fault)) is not None
