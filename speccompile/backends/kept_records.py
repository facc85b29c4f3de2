# SPDX-License-Identifier: Apache-2.0
"""Tuning records made on this machine, in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speccompile.common.cache_root import cache_root, find_cache_folder
from speccompile.common.code_cache import write_file

_log = logging.getLogger(__name__)
_KIND = "tuning"  # the folder in the cache


def record_file(*depends_on: object) -> Path:
    """Returns the file of the record of a graph on this machine; other arguments have another file."""
    digest = hashlib.sha256(repr(depends_on).encode()).hexdigest()[:32]
    return cache_root() / _KIND / f"{digest}.json"


def read_kept(file: Path) -> dict[str, Any] | None:
    """Returns the kept record; None where there is none that can be read."""
    try:
        record = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):  # none, or damaged: the next measurement replaces it
        return None
    return record if isinstance(record, dict) and record else None


def keep(file: Path, record: Mapping[str, Any]) -> None:
    """Keeps a record; another process that reads meanwhile sees the old one or the new one."""
    if find_cache_folder(_KIND) is None:
        return
    try:
        write_file(file, json.dumps(record).encode())
    except OSError as fault:
        _log.warning("a measurement of this machine is not kept: %s", fault)


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a compiled graph, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
