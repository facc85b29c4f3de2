# SPDX-License-Identifier: Apache-2.0
"""Locates the files of a job and computes their digests. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from speccompile.checkpoints.checkpoint import HUB_FILES, resolve_checkpoint
from speccompile.core.jobs import GraphJob
from speccompile.errors import CheckpointError

_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def find_folder(job: GraphJob, weights: str, patterns: Sequence[str] = HUB_FILES) -> Path:
    """Returns the checkpoint's folder, downloaded if need be; with random weights a folder with its config.

    Args:
        job: its model and, where no weights are read, the config to use instead.
        weights: "checkpoint" or "random".
        patterns: files of a hub checkpoint to download.

    Raises:
        CheckpointError: there is none, or the hub cannot be reached.
    """
    return resolve_checkpoint(job.model, patterns) if weights == "checkpoint" else find_config(job)


def find_config(job: GraphJob) -> Path:
    """Returns a folder with the config of a model, and its tokenizer if it has one; weights are not downloaded.

    Raises:
        CheckpointError: neither a folder, nor a config beside the recipe, nor a hub id that can be reached.
    """
    if Path(job.model).is_dir():
        return Path(job.model)
    if job.config is not None:
        return Path(job.config)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(job.model, allow_patterns=list(_SMALL_FILES)))
    except (OSError, ValueError) as fault:  # the hub's errors derive from these
        got = f"no local folder, not in the hub's cache, and the hub said: {str(fault).strip().splitlines()[0]}"
        expected = "its config.json, which is all that sizes need: in a folder, in the hub's cache, or on the hub"
        todo = "Check the name, the network and your access to a gated model, or give a folder with config.json."
        raise CheckpointError(job.model, got, expected, todo) from fault


def digests_from_checkpoint(
    source: Path, weights: str, patterns: Sequence[str], config: str = "config.json"
) -> dict[str, str]:
    """Returns the SHA-256 by name of the files that an export reads; with random weights config.json alone.

    The contents are read each time (a gigabyte a second or more): a file's size and time do not prove that it
    is unchanged, and a graph with outdated weights would pass every later check.

    Args:
        source: the folder.
        weights: "checkpoint" or "random".
        patterns: of the files beside it.
        config: the config's name.

    Raises:
        CheckpointError: a file cannot be read.
    """
    names = [source / config]
    if weights == "checkpoint":
        names += sorted({f for pattern in patterns for f in source.glob(pattern)})
    try:
        return {f.name: _digest(f) for f in names}
    except OSError as fault:
        got = f"{fault.strerror} at {fault.filename}"
        raise CheckpointError(str(source), got, "readable files", "Check the folder.") from fault


def _digest(path: Path) -> str:
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise CheckpointError(str(path), "no regular file", "a file", "Put the file in its place.")
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
