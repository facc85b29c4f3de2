# SPDX-License-Identifier: Apache-2.0
"""speccompile convert: a speculator's checkpoint in another layout of its method; a GGUF file as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from speccompile.cli.doctor import parse_overrides
from speccompile.cli.output import errors_as_json, print_json
from speccompile.errors import CheckpointError


def convert_command(
    speculator: Annotated[str, typer.Argument(help="A speculator's folder or hub id; or a model's GGUF file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; new or empty.")],
    layout: Annotated[str, typer.Option("--to", help="ours, speculators, vllm, ...: a layout of its method.")] = "ours",
    target: Annotated[str | None, typer.Option("--target", help="The model that it is for: folder or hub id.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE instead of its config's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a speculator in our layout or in another public one; nothing is written when the doctor finds an error.

    With a target, rows of the vocabulary that only pad it are cut, and the layouts that name their target name it.
    A GGUF file becomes a transformers checkpoint with float32 weights, which a recipe can name.
    """
    from speccompile.checkpoints.folders import names_gguf

    if names_gguf(speculator):
        _convert_gguf(speculator, output, as_json)
        return
    from speccompile.bundle.staging import claim_folder, staged_folder
    from speccompile.checkpoints.folders import resolve_checkpoint
    from speccompile.checkpoints.tensor_files import SPECULATOR_FILES
    from speccompile.core.registry import load_formats
    from speccompile.doctor.convert import convertible, layout_named, write_case
    from speccompile.doctor.doctor import find_target, open_known

    with errors_as_json(as_json):
        claim = claim_folder(output)
        formats = load_formats()
        folder = resolve_checkpoint(speculator, SPECULATOR_FILES)
        aim = find_target(target) if target else None
        case = open_known(folder, formats, aim, parse_overrides(overrides or []))
        written = layout_named(layout, formats, case.layout.method)
        if errors := convertible(case):
            first, others = errors[0], len(errors) - 1
            more = f" ({others} more)" if others else ""
            todo = f"{first.todo} `speccompile doctor {speculator}` lists every finding{more}."
            raise CheckpointError(first.where, first.got, first.expected, todo)
        with staged_folder(claim.path, claim.hold) as folder:
            write_case(folder, written, case)
    if as_json:
        print_json({"folder": str(output), "from": case.layout.name, "to": written.name})
    else:
        Console(soft_wrap=True, highlight=False, markup=False).print(
            f"{case.layout.label} -> {written.label}: {output}"
        )


def _convert_gguf(source: str, output: Path, as_json: bool) -> None:
    from speccompile.bundle.staging import claim_folder, staged_folder
    from speccompile.bundle.tokenizers import copy_tokenizer_files
    from speccompile.checkpoints.folders import count_blocks, resolve_checkpoint
    from speccompile.export.weights import write_plain

    with errors_as_json(as_json):
        claim = claim_folder(output)
        folder = resolve_checkpoint(source)
        with staged_folder(claim.path, claim.hold) as made:
            facts: dict[str, Any] = {"model_type": write_plain(folder, made), "block_types": count_blocks(folder)}
            facts["has_tokenizer"] = "tokenizer.json" in copy_tokenizer_files(folder, made)
    if as_json:
        print_json({"folder": str(output), **facts})
        return
    blocks = ", ".join(f"{num} {name}" for name, num in facts["block_types"].items())
    tokenizer = "" if facts["has_tokenizer"] else "; it has no tokenizer: put the model's tokenizer.json beside it"
    text = f"{facts['model_type']} ({blocks}) -> {output}{tokenizer}"
    Console(soft_wrap=True, highlight=False, markup=False).print(text)
