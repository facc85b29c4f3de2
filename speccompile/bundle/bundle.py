# SPDX-License-Identifier: Apache-2.0
"""Reads a bundle: nothing in it is used before its manifest and the digests of its files are checked.

Manifests whose values have wrong types or whose graphs contradict each other are refused, and wrong config fields.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from pydantic import ValidationError

from speccompile.bundle.format import (
    MANIFEST,
    REBUILD,
    SCHEMA_VERSION,
    check_files,
    check_no_foreign_files,
    digest_from_manifest,
    read_json,
)
from speccompile.bundle.manifest_records import GraphRecord, ImageRecord, Manifest, RecipeRecord, closed_keys
from speccompile.checkpoints.folders import is_gguf
from speccompile.common.extras import todo_for_checkpoint
from speccompile.common.json_reader import expected_of_fault, finite_number, shown, whole_number
from speccompile.core.specs import GraphSpec, compacted_cache_name, spec_from_json, updated_cache_name
from speccompile.errors import BundleError

_MAX_COUNT = 2**31 - 1
# What is expected in JSON's words, by pydantic's type of error.
_WORDS = {
    **dict.fromkeys(("model_type", "dict_type"), "an object"),
    "list_type": "a list",
    "string_type": "a text",
    "bool_type": "true or false",
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
}
_DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")


def check_types(where: str, manifest: Mapping[str, Any]) -> None:
    """Refuses a manifest in which a value that is read has a wrong type or is out of range."""
    try:
        Manifest.model_validate(manifest)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        parts = [part for part in fault["loc"] if part != "[key]"]
        got, expected = shown(fault["input"]), _WORDS.get(fault["type"]) or expected_of_fault(fault)
        if fault["type"] == "missing":
            got, expected = "no value", f"the key {parts[-1]}"
        if fault["type"] == "extra_forbidden":
            *parts, unknown = parts
            got, expected = f"an unknown key {shown(unknown)}", f"the keys {', '.join(closed_keys(parts))}"
        path = ".".join(map(str, parts))
        path = path if path.isprintable() and len(path) <= 200 else shown(path)
        raise BundleError(f"{where} ({path})", got, expected, REBUILD) from error


def check_specs(where: str, specs: Mapping[str, GraphSpec]) -> None:
    """Compares each graph's inputs and outputs with its names, and with the graphs that it borrows from."""
    for name, spec in specs.items():
        for field, got, expected in (*_faults(name, spec), *_borrowed(spec, specs)):
            raise BundleError(f"{where} (graphs.{name}.spec.{field})", got, expected, REBUILD)


def _faults(name: str, spec: GraphSpec) -> Iterator[tuple[str, str, str]]:
    if spec.name != name:
        yield "name", repr(spec.name), repr(name)
    for side, tensors in (("inputs", spec.inputs), ("outputs", spec.outputs)):
        names = [t.name for t in tensors]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            yield side, f"{twice[0]!r} twice", "every name once"
        for tensor in tensors:
            if tensor.dtype not in _DTYPES:
                yield side, f"{tensor.name!r} of dtype {tensor.dtype!r}", f"one of {', '.join(_DTYPES)}"
    inputs, outputs = {t.name for t in spec.inputs}, {t.name for t in spec.outputs}
    for field, held in (("caches", spec.caches), ("states", spec.states)):
        for cache in held:
            updates = {updated_cache_name(cache), compacted_cache_name(cache)}
            if cache not in inputs or not updates & outputs or held.count(cache) > 1:
                yield field, repr(cache), f"an input with an output {updated_cache_name(cache)!r}, once"
    kept = {*spec.caches, *spec.states}
    if forgotten := [t.name for t in spec.inputs if updated_cache_name(t.name) in outputs and t.name not in kept]:
        yield "caches", f"no {forgotten[0]!r}", "every input that has an updated output"
    if spec.caches != tuple(t.name for t in spec.inputs if t.name in spec.caches):
        yield "caches", "another order than that of the inputs", "the inputs' order"
    if spec.draft_vocab > spec.vocab_size > 0:
        yield "draft_vocab", str(spec.draft_vocab), f"at most vocab_size {spec.vocab_size}"
    if spec.num_candidates > spec.dist_width > 0:
        yield "num_candidates", str(spec.num_candidates), f"at most {spec.dist_width}"


def _borrowed(spec: GraphSpec, specs: Mapping[str, GraphSpec]) -> Iterator[tuple[str, str, str]]:
    inputs = {t.name for t in spec.inputs}
    for held in spec.borrowed:
        owner = specs.get(held.owner)
        if held.name not in inputs or owner is None or owner is spec or held.cache not in owner.caches:
            got = f"{held.name!r} of {held.cache!r} in {held.owner!r}"
            yield "borrowed", got, "an input of this graph, and a cache of another graph of the bundle"
    if spec.state_owner:
        owner = specs.get(spec.state_owner)
        if owner is None or owner is spec or owner.state_shapes(1) != spec.state_shapes(1):
            got = f"the states of {spec.state_owner!r}"
            yield "state_owner", got, "another graph of the bundle with states of the same names and sizes"


def check_fields(where: str, config: type[Any], values: Mapping[str, Any], todo: str = REBUILD) -> None:
    """Refuses JSON values (a list stands for a tuple) whose types are not those of a dataclass's fields."""
    hints = typing.get_type_hints(config)
    for name, value in values.items():
        if name in hints and not _fits(value, hints[name]):
            expected = str(hints[name]).removeprefix("<class '").removesuffix("'>").replace("typing.", "")
            raise BundleError(f"{where}.{name}", shown(value), expected, todo)


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a JSON value has the type of a field's hint; other types are left to the class to check."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Literal:
        return any(value == argument and type(value) is type(argument) for argument in arguments)
    if origin is typing.Annotated:
        return _fits(value, arguments[0])
    if origin is tuple:
        inner = arguments[0] if arguments else Any
        return isinstance(value, list | tuple) and all(_fits(item, inner) for item in value)
    if hint is float:
        return finite_number(value) is not None
    if hint is int:
        return whole_number(value, -_MAX_COUNT, 2**64) is not None
    return isinstance(value, hint) if hint in (str, bool, type(None)) else True


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
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that a request may choose."""
        return tuple(row["name"] for row in self.graph(TARGET).adapters)

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
        self, name: str, *, private: bool = False, message: str | None = None, bench: Mapping[str, Any] | None = None
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
