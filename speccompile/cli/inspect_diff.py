# SPDX-License-Identifier: Apache-2.0
"""How two bundles, graphs or folders of `build --dump-passes` differ: `inspect --diff`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from speccompile.common.extras import install_command
from speccompile.errors import BundleError, RuntimeFault

_VALUE = re.compile(r"%\d+")


def differences(first: Path, second: Path) -> dict[str, list[str]]:
    """Returns the lines of a unified diff by part; parts that are equal are left out.

    Args:
        first: a bundle, a folder of `build --dump-passes`, an .onnx file or a text; `second` is of the same kind.

    Raises:
        BundleError: a path is none of these, or both are of different kinds.
        RuntimeFault: graphs cannot be read without the build extra.
    """
    kinds = [_kind(first), _kind(second)]
    if kinds[0] != kinds[1]:
        raise BundleError("--diff", f"{kinds[0]} and {kinds[1]}", "two paths of one kind", "Choose another path.")
    before, after = _parts(first), _parts(second)
    found = {}
    for name in dict.fromkeys([*before, *after]):
        old, new = (side.get(name, "").splitlines() for side in (before, after))
        if lines := list(_diff(old, new)):
            found[name] = [f"--- {first}: {name}", f"+++ {second}: {name}", *lines]
    return found


def _diff(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    bare_old, bare_new = ([_VALUE.sub("%", line) for line in side] for side in (old, new))
    if bare_old == bare_new:
        bare_old, bare_new = list(old), list(new)
    for group in difflib.SequenceMatcher(None, bare_old, bare_new, autojunk=False).get_grouped_opcodes(3):
        yield f"@@ -{group[0][1] + 1},{group[-1][2] - group[0][1]} +{group[0][3] + 1},{group[-1][4] - group[0][3]} @@"
        for kind, old_start, old_end, new_start, new_end in group:
            if kind == "equal":
                yield from (f" {line}" for line in new[new_start:new_end])
            else:
                yield from (f"-{line}" for line in old[old_start:old_end])
                yield from (f"+{line}" for line in new[new_start:new_end])


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a bundle" if (path / "manifest.json").is_file() else "a folder of texts"
    if not path.is_file():
        raise BundleError(str(path), "no such file or folder", "a bundle, an .onnx file or a text", "Check the path.")
    return "an .onnx file" if path.suffix == ".onnx" else "a text"


def _parts(path: Path) -> Mapping[str, str]:
    if path.suffix == ".onnx":
        return {"graph": _text_from_graph(path)}
    if path.is_file():
        return {"text": _read(path)}
    if not (path / "manifest.json").is_file():
        if found := {file.relative_to(path).as_posix(): _read(file) for file in sorted(path.rglob("*.txt"))}:
            return found
        expected = "a bundle, or a folder of `build --dump-passes`"
        raise BundleError(str(path), "a folder without texts", expected, "Choose another folder.")
    from speccompile.bundle.bundle import read_bundle
    from speccompile.bundle.report import dotted_keys, text_from_value

    bundle = read_bundle(path, verify=False)
    recipe: dict[str, Any] = bundle.manifest["recipe"]
    parts = {"recipe": "\n".join(f"{key}: {text_from_value(value)}" for key, value in dotted_keys(recipe))}
    for name in bundle.graphs:
        file = bundle.path / bundle.graphs[name]["file"]
        if file.suffix == ".onnx":  # a plan holds code, and no graph to read
            parts[name] = _text_from_graph(file)
    return parts


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise BundleError(str(path), str(fault), "a text in UTF-8", "Check the file.") from fault


def read_graph(path: Path) -> Any:
    """Returns the model of an .onnx file. Raises BundleError, RuntimeFault: it cannot be read, or not here."""
    try:
        import onnx_ir as ir
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    except ImportError as fault:
        todo = f"Install the build extra: {install_command('build')}."
        raise RuntimeFault("inspect", f"no package {fault.name}", "onnx and onnx-ir", todo) from fault
    try:
        model = ir.load(path)
        if not model.opset_imports:  # of an empty file
            raise ValueError("no graph")
        return model
    except (DecodeError, OSError, ValueError, ir.serde.SerdeError) as fault:
        reason: BaseException = fault
        while reason.__cause__ is not None:  # the outer ones quote the whole file
            reason = reason.__cause__
        got = (str(reason).strip().splitlines() or ["no graph"])[0]
        raise BundleError(str(path), got, "an ONNX model", "Check the file.") from fault


def _text_from_graph(path: Path) -> str:
    model = read_graph(path)
    from speccompile.passes.text import text_from_model

    try:
        return text_from_model(model)
    except OSError as fault:  # of weights beside the file
        raise BundleError(str(path), str(fault), "a graph with its weights", "Check the files.") from fault
