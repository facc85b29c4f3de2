# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders: find them, read their sizes, prove them complete. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speccompile.core.specs import ModelDims
from speccompile.errors import CheckpointError

# The names a size has in config.json, the usual one first; older architectures have their own.
_NAMES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head"),
    "max_positions": ("max_position_embeddings", "n_positions", "seq_length"),
}


def read_config(source: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder.

    Raises:
        CheckpointError: missing, or not a JSON object.
    """
    path = source / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as fault:
        raise CheckpointError(
            str(path), "no such file", "the config of a transformers checkpoint", "Check the folder's path."
        ) from fault
    except (OSError, ValueError) as fault:
        raise CheckpointError(str(path), str(fault), "a JSON object", "Download the file again.") from fault
    if not isinstance(data, dict):
        raise CheckpointError(str(path), type(data).__name__, "a JSON object", "Download the file again.")
    return data


def _size(path: Path, config: Mapping[str, Any], field: str) -> int:
    value = next((config[n] for n in _NAMES[field] if config.get(n) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        todo = "Only causal language models with a flat config are supported."
        if "text_config" in config:
            todo = "This is a multimodal checkpoint; use its text model alone."
        expected = f"a positive integer under {' or '.join(_NAMES[field])}"
        raise CheckpointError(str(path / "config.json"), f"{value!r}", expected, todo)
    return value


def read_dims(source: Path) -> ModelDims:
    """The sizes of the decoder in `source`, from its config.json alone; num_params stays 0.

    Raises:
        CheckpointError: a size is missing or not a positive integer.
    """
    config = read_config(source)
    sizes = {field: _size(source, config, field) for field in _NAMES}
    heads = sizes["num_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or sizes["hidden_size"] // heads
    return ModelDims(
        model_type=str(config.get("model_type", "")), num_kv_heads=int(kv_heads), head_dim=int(head_dim), **sizes
    )
