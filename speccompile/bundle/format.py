# SPDX-License-Identifier: Apache-2.0
"""Files of a bundle and of other folders that speccompile wrote: names, digests, records of them, comparisons.

A bundle's record is its manifest. A trained speculator and a Triton model hold `.speccompile.json`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import platform
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from speccompile.common.json_reader import read_json_object
from speccompile.core.sampling import SAMPLER_VERSION
from speccompile.errors import BuildError, BundleError
from speccompile.version import VERSION

SCHEMA_VERSION = 4
REBUILD = "Build the bundle again, or copy it again from where it was built."
MANIFEST = "manifest.json"
# Made after the bundle, by `speccompile verify`; the manifest does not list them.
CERTIFICATE, CERTIFICATE_PAGE = "certificate.json", "certificate.html"
CERTIFICATE_FILES = frozenset((CERTIFICATE, CERTIFICATE_PAGE))
_CHUNK_BYTES = 1 << 22


def check_files(folder: Path, files: Mapping[str, Any], verify: bool = True) -> None:
    """Compares a folder with its records by `digests_from_folder`; files without a record are ignored.

    Raises:
        BundleError: a file is missing, has another size or digest, or its path leaves the folder.
    """
    for name, record in files.items():
        file = folder / name
        if not isinstance(record, dict) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise BundleError(str(file), "a bad record in the list of files", "a relative path with a digest", REBUILD)
        if not os.path.isfile(file):
            raise BundleError(str(file), "no such file", f"{record.get('size_bytes')} bytes", REBUILD)
        size = file.stat().st_size
        if size != record.get("size_bytes"):
            raise BundleError(str(file), f"{size} bytes", f"{record.get('size_bytes')} bytes", REBUILD)
    for name, record in files.items() if verify else ():
        digest = digest_from_file(folder / name)
        if digest != record.get("sha256"):
            got, expected = f"sha256 {digest[:16]}...", f"{str(record.get('sha256'))[:16]}..."
            raise BundleError(str(folder / name), got, expected, f"The file was changed. {REBUILD}")


def list_foreign_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Returns the sorted paths in a bundle's folder that its manifest does not list, hidden files included."""
    listed = {MANIFEST, *CERTIFICATE_FILES, *manifest["files"]}
    return sorted({name for name, _ in files_below(folder, on_fault=None)} - listed)


def check_no_foreign_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Refuses a folder with files that the manifest does not list: readers of a bundle find files by their names.

    Names that begin with a dot are allowed: no reader opens them, and systems and download tools create them.
    """
    foreign = [name for name in list_foreign_files(folder, manifest) if not is_hidden(name)]
    if foreign:
        more = f" ({len(foreign) - 1} more)" if len(foreign) > 1 else ""
        got = f"a file that the manifest does not list{more}"
        todo = "Move it out of the bundle: nothing holds its contents to what was built."
        raise BundleError(str(folder / foreign[0]), got, "the files of the manifest alone", todo)


def is_hidden(name: str) -> bool:
    """Returns whether a path below a bundle's folder has a part that begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def digests_from_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns {relative path: {"sha256", "size_bytes"}} of all files below `folder` except the manifest."""
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f != folder / MANIFEST)
    return {
        f.relative_to(folder).as_posix(): {"sha256": digest_from_file(f), "size_bytes": f.stat().st_size} for f in files
    }


def digest_from_json(value: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a mapping of JSON and dataclasses, see `json_from_options`, whatever the keys' order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=json_from_options).encode()).hexdigest()


def json_from_options(options: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that can change a job's graph; those that cannot have `compare=False`."""
    return {f.name: getattr(options, f.name) for f in fields(options) if f.compare}


def weights_beside(file: Path, files: Iterable[Path]) -> int:
    """Returns the bytes of the graphs that run in turn with one, by `files` of all that run: of the others' folders."""
    folders = {other.parent for other in files} - {file.parent}
    return sum(part.stat().st_size for folder in folders for part in folder.iterdir() if part.is_file())


def digest_from_manifest(manifest: Mapping[str, Any]) -> str:
    return digest_from_json({k: v for k, v in manifest.items() if k != "digest"})


def digest_from_file(path: Path) -> str:
    """Returns the SHA-256 of a file's contents, hexadecimal."""
    total = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            total.update(chunk)
    return total.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file."""
    return read_json_object(path, BundleError, REBUILD)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


# Packages whose version may change a graph or a measurement.
_PACKAGES = ("numpy", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "torch", "transformers")


def versions_from_environment() -> dict[str, str]:
    """Returns the versions of Python, speccompile, its sampler and the packages a build depends on, where installed."""
    versions = {"python": platform.python_version(), "speccompile": VERSION}
    versions["sampler"] = str(SAMPLER_VERSION)
    found = ((name, package_version(name)) for name in _PACKAGES)
    return versions | {name: version for name, version in found if version is not None}


@functools.cache
def package_version(package: str) -> str | None:
    """Returns the version of an installed package, which is read once a process: a file each, 4 ms."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def digest_from_sources(packages: Iterable[str]) -> str:
    """Returns the SHA-256 over Python files of speccompile's `packages`, e.g. "passes" or "core/specs"."""
    root = Path(__file__).parents[1]
    total = hashlib.sha256()
    for package in sorted(packages):
        base = root / package
        for file in sorted(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")]:
            total.update(f"{file.relative_to(root)}\0{digest_from_file(file)}\n".encode())
    return total.hexdigest()


def digest_from_package(module: str, leave_out: Collection[str] = ()) -> str:
    """Returns the SHA-256 over the Python files of a module's package, without modules such as "proposer"."""
    package, total = module.rpartition(".")[0] or module, hashlib.sha256()
    spec = importlib.util.find_spec(package)
    assert spec is not None
    homes = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [(home, file) for home in homes for file in sorted(home.rglob("*.py"))]
    for home, file in files or [(Path(str(spec.origin)).parent, Path(str(spec.origin)))]:
        if file.stem not in leave_out:
            total.update(f"{package}/{file.relative_to(home)}\0{digest_from_file(file)}\n".encode())
    return total.hexdigest()


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


def _raise(fault: OSError) -> None:
    raise fault


def files_below(folder: Path, on_fault: Callable[[OSError], None] | None = _raise) -> Iterator[tuple[str, Path]]:
    """Yields (relative path, path) of everything but folders below `folder`; links are not followed.

    Args:
        on_fault: gets the fault of a folder that cannot be read; None: it is passed over.
    """
    for root, folders, files in os.walk(folder, onerror=on_fault):
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
    if not os.path.isfile(path):
        return {}
    try:
        return read_json_object(path, BuildError, "")
    except BuildError:
        return {}
