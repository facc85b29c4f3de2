# SPDX-License-Identifier: Apache-2.0
"""Records of the folders that speccompile wrote: the digest of every file, by which its own files are recognised.

A bundle's record is its manifest. A trained speculator and a Triton model hold `.speccompile.json`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from speccompile.bundle.format import (
    CERTIFICATE_FILES,
    MANIFEST,
    digest_from_file,
    digest_from_manifest,
    digests_from_folder,
    write_json,
)
from speccompile.common.json_reader import read_json_object
from speccompile.errors import BuildError

RECORD = ".speccompile.json"
BUNDLE, SPECULATOR, MODEL, RUN = "bundle", "trained speculator", "Triton model", "training run"


@dataclass(frozen=True)
class Record:
    """Contents of a folder's record."""

    name: str
    kind: str
    files: Mapping[str, Any]  # {relative path: {"sha256", "size_bytes"}} of all files except the record
    is_intact: bool  # the record's own digest holds


@dataclass(frozen=True)
class Difference:
    """Differences of a folder from its record."""

    foreign: tuple[str, ...]  # paths that no record lists; a folder without any listed file is one path and ends in "/"
    changed: tuple[str, ...]  # paths of listed files that were changed since


def write_record(folder: Path, kind: str) -> None:
    """Write the record of all files below `folder`; the last step before it is renamed to its destination."""
    _write(folder, kind, digests_from_folder(folder))


def write_mark(folder: Path, kind: str) -> None:
    """Write a record with the kind of a folder and without files: those are added during the work."""
    _write(folder, kind, {})


def read_record(folder: Path) -> Record | None:
    """Returns the record in `folder`; None where there is none, or a file of that name is not a record."""
    manifest = _read(folder / MANIFEST)
    if isinstance(manifest.get("files"), dict) and {"schema_version", "graphs"} <= set(manifest):
        return _record(MANIFEST, BUNDLE, manifest)
    record = _read(folder / RECORD)
    if isinstance(record.get("files"), dict) and "speccompile" in record:
        return _record(RECORD, str(record.get("kind")), record)
    return None


def compare_folder(folder: Path, record: Record | None) -> Difference:
    """Returns the files in `folder` that speccompile did not write, or that were changed since.

    Missing files, empty folders and a bundle's certificate do not count. Raises OSError where one cannot be read.
    """
    files = {} if record is None else {record.name: None, **record.files}
    made_again = CERTIFICATE_FILES if record is not None and record.kind == BUNDLE else frozenset()
    parents = {parent.as_posix() for name in files for parent in PurePosixPath(name).parents}
    foreign, changed = set(), []
    for name, path in files_below(folder):
        if name in made_again:
            continue
        if name not in files:
            above = [parent.as_posix() for parent in reversed(PurePosixPath(name).parents)]
            outer = next((parent for parent in above if parent not in parents | {"."}), None)
            foreign.add(name if outer is None else f"{outer}/")
        elif _is_changed(path, files[name], record):
            changed.append(name)
    return Difference(tuple(sorted(foreign)), tuple(sorted(changed)))


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields (relative path, path) of everything but folders below `folder`; links are not followed."""
    for root, folders, files in os.walk(folder, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in (*files, *links):
            path = Path(root, name)
            yield path.relative_to(folder).as_posix(), path


def _is_changed(path: Path, facts: Any, record: Record | None) -> bool:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return True
    if facts is None:
        return record is not None and not record.is_intact
    if not isinstance(facts, dict) or status.st_size != facts.get("size_bytes"):
        return True
    return digest_from_file(path) != facts.get("sha256")


def _write(folder: Path, kind: str, files: Mapping[str, Any]) -> None:
    record = {"speccompile": 1, "kind": kind, "files": files}
    write_json(folder / RECORD, {**record, "digest": digest_from_manifest(record)})


def _record(name: str, kind: str, data: Mapping[str, Any]) -> Record:
    return Record(name, kind, data["files"], data.get("digest") == digest_from_manifest(data))


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, BuildError, "")
    except BuildError:
        return {}


def _raise(fault: OSError) -> None:
    raise fault
