# SPDX-License-Identifier: Apache-2.0
"""Reads a bundle: nothing in it is used before its manifest and the digests of its files are checked."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.checkpoints.gguf.header import is_gguf
from speccompile.common.json_reader import read_json_object, shown
from speccompile.core.specs import GraphSpec, spec_from_json
from speccompile.errors import BundleError
from speccompile.runtime.manifest_checks import check_types
from speccompile.runtime.records import GraphRecord, ImageRecord, RecipeRecord
from speccompile.runtime.rules import record_from_json
from speccompile.runtime.spec_checks import check_specs

SCHEMA_VERSION = 3
MANIFEST = "manifest.json"
# Made after the bundle, by `speccompile verify`; the manifest does not list them.
CERTIFICATE, CERTIFICATE_PAGE = "certificate.json", "certificate.html"
CERTIFICATE_FILES = frozenset((CERTIFICATE, CERTIFICATE_PAGE))
TARGET, VISION = "target", "vision"
_REBUILD = "Build the bundle again, or copy it again from where it was built."
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Bundle:
    """A bundle whose manifest has been read.

    Args:
        path: its folder.
        manifest: the parsed manifest.json; see docs/reference/bundle.md for its keys.
    """

    path: Path
    manifest: dict[str, Any]

    @property
    def graphs(self) -> dict[str, Any]:
        """The graphs' records by name, as the build wrote them; `graph` has the fields that the runtime reads."""
        graphs: dict[str, Any] = self.manifest["graphs"]
        return graphs

    @property
    def recipe(self) -> RecipeRecord:
        """The resolved recipe."""
        return record_from_json(RecipeRecord, self.manifest["recipe"])

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's own end-of-sequence tokens."""
        return tuple(self.manifest["eos_token_ids"])

    @property
    def tokenizer_path(self) -> Path | None:
        """The path of tokenizer.json; None where the bundle was built from a config alone."""
        name = self.manifest.get("tokenizer")
        return None if name is None else self.path / name

    @property
    def images(self) -> ImageRecord | None:
        """How images of prompts are prepared; None: the bundle has no vision tower."""
        record = self.manifest.get("images")
        return None if record is None or VISION not in self.graphs else record_from_json(ImageRecord, record)

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool = False,
        message: str | None = None,
        bench: Mapping[str, Any] | None = None,
    ) -> str:
        """Uploads the bundle to the Hugging Face hub, with a model card; see `runtime.hub.push_bundle`.

        Returns:
            The commit's URL.

        Raises:
            BundleError: its files were changed, or the hub refuses it.
        """
        from speccompile.runtime.hub import push_bundle

        check_files(self.path, self.manifest["files"])
        return push_bundle(self.path, self.manifest, name, private=private, message=message, bench=bench)

    def graph(self, name: str) -> GraphRecord:
        """Returns the record of a graph."""
        return record_from_json(GraphRecord, self.graphs[name])

    def graph_path(self, name: str) -> Path:
        """Returns the path of a graph's .onnx file or plan."""
        return self.path / self.graph(name).file

    def graph_spec(self, name: str) -> GraphSpec:
        """Returns the inputs and outputs of a graph."""
        return self.graph(name).graph_spec()


def read_bundle(path: Path | str, verify: bool = True) -> Bundle:
    """Reads and checks a bundle.

    Args:
        path: the bundle's folder.
        verify: compare every file with its digest; without it, only presence and sizes are checked.

    Raises:
        BundleError: no bundle, another schema version, a file that the manifest does not list, or one that is
            missing, truncated or changed.
    """
    path = Path(path)
    if not path.is_dir():
        is_model = path.exists() and is_gguf(path)
        got = "a GGUF file" if is_model else "a file" if path.exists() else "no such folder"
        todo = todo_for_checkpoint(path) if is_model else "Build it first: speccompile build RECIPE -o DIR."
        raise BundleError(str(path), got, "the folder of a bundle", todo)
    if not (path / MANIFEST).exists() and (path / "config.json").is_file():
        got = "a checkpoint (config.json, no manifest.json)"
        raise BundleError(str(path), got, "the folder of a bundle", todo_for_checkpoint(path))
    manifest = read_json(path / MANIFEST)
    _check_manifest(path / MANIFEST, manifest)
    check_files(path, manifest["files"], verify)
    check_no_foreign_files(path, manifest)
    return Bundle(path, manifest)


def _check_manifest(where: Path, manifest: Mapping[str, Any]) -> None:
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION:
        todo = "Build the bundle again with this version of speccompile."
        raise BundleError(str(where), f"schema version {shown(version)}", f"schema version {SCHEMA_VERSION}", todo)
    check_types(str(where), manifest)
    if TARGET not in manifest["graphs"]:
        raise BundleError(
            f"{where} (graphs)", "no graph 'target'", "the target's graph, which every bundle has", _REBUILD
        )
    for name, graph in manifest["graphs"].items():
        if graph["file"] not in manifest["files"]:
            raise BundleError(f"{where} (graphs.{name})", "a graph whose file is not listed", "one of files", _REBUILD)
    if manifest.get("digest") != digest_from_manifest(manifest):
        got, expected = "contents that differ from its own digest", f"digest {shown(manifest.get('digest'))[:17]}..."
        raise BundleError(str(where), got, expected, f"The manifest was changed. {_REBUILD}")
    specs = {name: spec_from_json(graph["spec"]) for name, graph in manifest["graphs"].items()}
    check_specs(str(where), specs)
    tokenizer = manifest.get("tokenizer")
    if tokenizer is not None and tokenizer not in manifest["files"]:
        raise BundleError(f"{where} (tokenizer)", repr(tokenizer), "one of files", _REBUILD)


def check_files(folder: Path, files: Mapping[str, Any], verify: bool = True) -> None:
    """Compares a folder with the records that `digests_from_folder` made of it. Files without a record are ignored.

    Raises:
        BundleError: a file is missing, has another size or digest, or its path leaves the folder.
    """
    for name, record in files.items():
        file = folder / name
        if not isinstance(record, dict) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise BundleError(str(file), "a bad record in the list of files", "a relative path with a digest", _REBUILD)
        if not os.path.isfile(file):
            raise BundleError(str(file), "no such file", f"{record.get('size_bytes')} bytes", _REBUILD)
        size = file.stat().st_size
        if size != record.get("size_bytes"):
            raise BundleError(str(file), f"{size} bytes", f"{record.get('size_bytes')} bytes", _REBUILD)
    for name, record in files.items() if verify else ():
        digest = digest_from_file(folder / name)
        if digest != record.get("sha256"):
            got, expected = f"sha256 {digest[:16]}...", f"{str(record.get('sha256'))[:16]}..."
            raise BundleError(str(folder / name), got, expected, f"The file was changed. {_REBUILD}")


def todo_for_checkpoint(folder: Path) -> str:
    """Returns the command to type where a checkpoint's folder was given instead of a recipe or a bundle."""
    return f"Build it first: speccompile build {shlex.quote(str(folder.absolute()))} -o bundle."


def list_foreign_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Returns the files of a bundle's folder that its manifest does not list, hidden files included.

    Args:
        folder: of the bundle.
        manifest: of the bundle; only `files` is read.

    Returns:
        Sorted paths below `folder`: files, and links to folders, which are not followed. Empty folders hold nothing
        and are not named, nor is the certificate.
    """
    listed, found = {MANIFEST, *CERTIFICATE_FILES, *manifest["files"]}, []
    for root, folders, files in os.walk(folder):
        here = Path(root)
        links = [name for name in folders if (here / name).is_symlink()]
        found += [(here / name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(set(found) - listed)


def check_no_foreign_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Refuses a folder with files that the manifest does not list: readers of a bundle find files by their names.

    Files whose name begins with a dot, or that are below such a folder, are allowed: no reader opens them, and
    operating systems and download tools create them.

    Raises:
        BundleError: there is such a file.
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
    """Returns the SHA-256 of a JSON-ready mapping, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def weights_beside(file: Path, files: Iterable[Path]) -> int:
    """Returns the bytes of the graphs that run in turn with one: of all files in the folders of the others.

    Args:
        file: the graph.
        files: of all graphs that run, itself among them.
    """
    folders = {other.parent for other in files} - {file.parent}
    return sum(part.stat().st_size for folder in folders for part in folder.iterdir() if part.is_file())


def digest_from_manifest(manifest: Mapping[str, Any]) -> str:
    """Returns the digest of a manifest, its own `digest` left out."""
    return digest_from_json({k: v for k, v in manifest.items() if k != "digest"})


def digest_from_file(path: Path) -> str:
    """Returns the SHA-256 of a file's contents, hexadecimal."""
    total = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            total.update(chunk)
    return total.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
        BundleError: the file is missing, truncated, or not an object.
    """
    return read_json_object(path, BundleError, _REBUILD)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes a JSON object, indented."""
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
