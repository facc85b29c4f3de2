# SPDX-License-Identifier: Apache-2.0
"""Folders of models of which the weights are not wanted."""

from __future__ import annotations

from pathlib import Path

from speccompile.errors import CheckpointError

_SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def find_config(model: str) -> Path:
    """A folder with the config of a model, and its tokenizer if it has one; weights are not downloaded.

    Args:
        model: a folder or a hub id.

    Raises:
        CheckpointError: neither a folder nor a hub id that can be reached.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(_SMALL_FILES)))
    except (OSError, ValueError) as fault:  # the hub's errors derive from these
        got = f"no local folder, and the hub said: {str(fault).strip().splitlines()[0]}"
        todo = "Check the name, the network and your access to a gated model, or give a local folder."
        raise CheckpointError(model, got, "a folder or a hub id that can be reached", todo) from fault
