# SPDX-License-Identifier: Apache-2.0
"""A GGUF file as a transformers checkpoint: transformers and the package `gguf` read it, every block type they know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccompile.errors import CheckpointError

_TOKENS = "tokenizer.ggml.tokens"
_TODO = "Use the transformers checkpoint that the file was made of."


def write_checkpoint(source: Path, folder: Path) -> dict[str, Any]:
    """Writes config, weights (float32, as the blocks mean them) and tokenizer of a GGUF file.

    Args:
        source: the file; of a model in several files, the first is not enough.
        folder: exists, and is empty.

    Returns:
        {"model_type": of the config, "block_types": {name: number of tensors}, "has_tokenizer"}.

    Raises:
        CheckpointError: no such file, no GGUF file, or an architecture or a block type that transformers does not read.
    """
    if not source.is_file():
        raise CheckpointError(str(source), "no such file", "a GGUF file", "Check the path.")
    block_types, has_tokenizer = _read_contents(source)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from speccompile.export.weights import no_progress_bar

    where = {"gguf_file": source.name, "local_files_only": True, "trust_remote_code": False}
    try:
        with no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(source.parent, dtype="float32", **where)
        if has_tokenizer:
            AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(folder)
    except (ValueError, KeyError, OSError, NotImplementedError, RuntimeError, ImportError) as fault:
        got = f"{type(fault).__name__}: {(str(fault).strip().splitlines() or ['no message'])[0]}"
        raise CheckpointError(str(source), got, "a GGUF file that transformers reads", _TODO) from fault
    _plain(model).save_pretrained(folder)
    return {"model_type": model.config.model_type, "block_types": block_types, "has_tokenizer": has_tokenizer}


def _plain(model: Any) -> Any:
    """Returns the same model without the mark of its quantisation, with which it could not be saved."""
    import torch

    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    return plain


def _read_contents(source: Path) -> tuple[dict[str, int], bool]:
    """Returns the number of tensors by block type, and whether the file has a tokenizer."""
    try:
        from gguf import GGUFReader
    except ImportError as fault:
        raise CheckpointError(str(source), "no package gguf", "gguf", "Install speccompile[build].") from fault
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, KeyError, OSError) as fault:
        got = f"a file that is not read: {(str(fault).strip().splitlines() or ['no message'])[0]}"
        raise CheckpointError(str(source), got, "a whole GGUF file", "Download the file again.") from fault
    counts: dict[str, int] = {}
    for tensor in reader.tensors:
        counts[tensor.tensor_type.name] = counts.get(tensor.tensor_type.name, 0) + 1
    if not counts:
        raise CheckpointError(str(source), "no tensors", "the weights of a model", "Give the file with the weights.")
    return dict(sorted(counts.items())), _TOKENS in reader.fields
