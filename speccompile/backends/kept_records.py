# SPDX-License-Identifier: Apache-2.0
"""Tuning records made on this machine, in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speccompile.common.cache_root import cache_root, find_cache_folder

_KIND = "tuning"  # the folder in the cache


def record_file(*depends_on: object) -> Path:
    """Returns the file of the record of a graph on this machine; other arguments have another file."""
    digest = hashlib.sha256(repr(depends_on).encode()).hexdigest()[:32]
    return cache_root() / _KIND / f"{digest}.json"


def read_kept(file: Path) -> dict[str, Any] | None:
    """Returns the kept record; None where there is none that can be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return None
    record: dict[str, Any] = json.loads(text)
    return record


def keep(file: Path, record: Mapping[str, Any]) -> None:
    """Keeps a record; another process that reads meanwhile sees the old one or the new one.

    Raises:
        BuildError: see `find_cache_folder`.
    """
    if find_cache_folder(_KIND) is None:
        return
    fresh = file.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_text(json.dumps(record), encoding="utf-8")
    fresh.replace(file)


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a compiled graph, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
