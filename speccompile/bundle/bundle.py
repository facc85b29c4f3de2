# SPDX-License-Identifier: Apache-2.0
"""Reads a bundle: nothing in it is used before its manifest and the digests of its files are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.bundle.format import (
    MANIFEST,
    REBUILD,
    SCHEMA_VERSION,
    check_files,
    check_no_foreign_files,
    digest_from_manifest,
    read_json,
)
from speccompile.bundle.manifest_checks import check_specs, check_types
from speccompile.bundle.manifest_records import GraphRecord, ImageRecord, RecipeRecord
from speccompile.checkpoints.gguf.header import is_gguf
from speccompile.common.extras import todo_for_checkpoint
from speccompile.common.json_reader import shown
from speccompile.core.specs import GraphSpec, spec_from_json
from speccompile.errors import BundleError

TARGET, VISION = "target", "vision"


@dataclass(frozen=True)
class Bundle:
    """A bundle whose manifest has been read.

    Args:
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
        return RecipeRecord.model_validate(self.manifest["recipe"])

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(self.manifest["eos_token_ids"])

    @property
    def tokenizer_path(self) -> Path | None:
        """The path of tokenizer.json; None where the bundle was built from a config alone."""
        name = self.manifest.get("tokenizer")
        return None if name is None else self.path / name

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder of the tokenizer and its chat template; None where the bundle has no tokenizer."""
        path = self.tokenizer_path
        return None if path is None else path.parent

    @property
    def images(self) -> ImageRecord | None:
        """How images of prompts are prepared; None: the bundle has no vision tower."""
        record = self.manifest.get("images")
        return None if record is None or VISION not in self.graphs else ImageRecord.model_validate(record)

    def show(self) -> None:
        """Prints what was built, its size, and the sizes of its graphs."""
        from speccompile.bundle.report import summary, text_from_bytes

        sizes = {name: record["size_bytes"] for name, record in self.manifest["files"].items()}
        rows = [("bundle", str(self.path)), *summary(self.manifest)]
        for name, record in self.graphs.items():
            folder = f"{Path(record['file']).parent.as_posix()}/"
            size = sum(size for file, size in sizes.items() if file.startswith(folder))
            rows.append((f"graph {name}", text_from_bytes(size)))
        for label, value in rows:
            print(f"{label:<20} {value}")

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool = False,
        message: str | None = None,
        bench: Mapping[str, Any] | None = None,
    ) -> str:
        """Uploads the bundle with a model card, and returns the commit's URL; see `publish.push_bundle`."""
        from speccompile.bundle.publish import push_bundle

        check_files(self.path, self.manifest["files"])
        return push_bundle(self.path, self.manifest, name, private=private, message=message, bench=bench)

    def graph(self, name: str) -> GraphRecord:
        return GraphRecord.model_validate(self.graphs[name])

    def graph_path(self, name: str) -> Path:
        return self.path / self.graph(name).file

    def graph_spec(self, name: str) -> GraphSpec:
        return self.graph(name).graph_spec()


def read_bundle(path: Path | str, verify: bool = True) -> Bundle:
    """Reads and checks a bundle.

    Args:
        verify: compare every file with its digest; without it, only presence and sizes are checked.

    Raises:
        BundleError: no bundle, another schema version, or a file that is unlisted, missing, truncated or changed.
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
            f"{where} (graphs)", "no graph 'target'", "the target's graph, which every bundle has", REBUILD
        )
    for name, graph in manifest["graphs"].items():
        if graph["file"] not in manifest["files"]:
            raise BundleError(f"{where} (graphs.{name})", "a graph whose file is not listed", "one of files", REBUILD)
    if manifest.get("digest") != digest_from_manifest(manifest):
        got, expected = "contents that differ from its own digest", f"digest {shown(manifest.get('digest'))[:17]}..."
        raise BundleError(str(where), got, expected, f"The manifest was changed. {REBUILD}")
    specs = {name: spec_from_json(graph["spec"]) for name, graph in manifest["graphs"].items()}
    check_specs(str(where), specs)
    tokenizer = manifest.get("tokenizer")
    if tokenizer is not None and tokenizer not in manifest["files"]:
        raise BundleError(f"{where} (tokenizer)", repr(tokenizer), "one of files", REBUILD)
