# SPDX-License-Identifier: Apache-2.0
"""Embeddings and LM head of a target, copied into the graph of a speculator that has none of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.checkpoint import EMBEDDINGS as _EMBEDDINGS
from speccompile.checkpoints.config_values import text_names
from speccompile.checkpoints.folders import digests_from_checkpoint, find_folder
from speccompile.checkpoints.lora import digests_of_adapter, open_lora
from speccompile.checkpoints.tensor_files import TensorFiles, open_files
from speccompile.core.jobs import SourceContext
from speccompile.errors import CheckpointError
from speccompile.ops.grid import Grid

if TYPE_CHECKING:
    import torch

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.gguf")
RANDOM_SEED = 1
EMBEDDINGS, LM_HEAD = "embeddings", "LM head"
_HEADS = ("lm_head.weight", "embed_out.weight")
_OTHER_PREFIX, _PREFIX = "backbone.", "model."  # in the files of Nemotron-H, and in the model


@dataclass(frozen=True, eq=False)
class TargetTables:
    """Tables of a target in float32, one tensor where they are tied."""

    embeddings: torch.Tensor  # [vocab, hidden], as stored: without a factor that the target applies
    lm_head: torch.Tensor  # [vocab, hidden]; without its bias


def digests_from_target(context: SourceContext) -> dict[str, str]:
    """Returns the SHA-256 by "target/" and name of the files that `read_tables` reads, an adapter's among them."""
    assert context.target_job is not None
    folder = find_folder(context.target_job, context.weights)
    digests = digests_from_checkpoint(folder, context.weights, WEIGHT_FILES) | digests_of_adapter(context.target_job)
    return {f"target/{name}": digest for name, digest in digests.items()}


def read_tables(context: SourceContext) -> TargetTables:
    """Returns the tables of the target for which a speculator is built; random ones where weights are random."""
    import torch

    assert context.target_job is not None and context.target is not None
    if context.weights == "random":
        size = (context.target.vocab_size, context.target.hidden_size)
        table = torch.empty(size).normal_(0, 0.02, generator=torch.Generator().manual_seed(RANDOM_SEED))
        return TargetTables(table, table)
    folder = find_folder(context.target_job, context.weights)
    names = _names(folder)
    files = open_files(folder)
    keys = text_names(files.headers)
    renamed = {name: key for name, key in keys.items() if name.startswith(_OTHER_PREFIX)}
    keys |= {_PREFIX + name.removeprefix(_OTHER_PREFIX): key for name, key in renamed.items()}
    adapter = None if context.target_job.lora is None else open_lora(context.target_job.lora)
    tables: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(names):
        if name not in keys:
            todo = "Fetch the target again, or use a speculator with tables of its own."
            raise CheckpointError(str(folder), f"no {name}", "the table that the speculator shares", todo)
        tables[name] = files.tensor(keys[name]).to(torch.float32)
        if adapter is not None:
            tables[name] = torch.from_numpy(adapter.merge_table(name, tables[name].numpy()))
    return TargetTables(*(tables[name] for name in names))


@dataclass(frozen=True)
class TableGrids:
    """The grids of a target's embeddings and LM head alone: an `ops.grid.GridSource`."""

    files: TensorFiles
    grid_keys: tuple[str, ...]

    def grid(self, key: str) -> Grid | None:
        return self.files.grid(key)


def grids_of_tables(folder: Path) -> TableGrids:
    """Returns the tables of a target that are stored as levels of few bits."""
    files = open_files(folder)
    found = {held[1] for table in (EMBEDDINGS, LM_HEAD) if (held := find_table(folder, table)) is not None}
    return TableGrids(files, tuple(key for key in files.grid_keys if key in found))


def find_table(folder: Path, table: str) -> tuple[TensorFiles, str] | None:
    """Returns the files and the key of `EMBEDDINGS` or `LM_HEAD`, by the names alone; None where none is stored."""
    files = open_files(folder)
    outside = {name: key for name, key in text_names(files.headers).items() if ".layers." not in name}
    for endings in ((_HEADS,) if table == LM_HEAD else ()) + (_EMBEDDINGS,):
        for name, key in outside.items():
            if name.endswith(endings):
                return files, key
    return None


def _names(folder: Any) -> tuple[str, str]:
    import torch
    from transformers import AutoModelForCausalLM

    from speccompile.checkpoints.model_config import read_model_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_model_config(folder), trust_remote_code=False)
    by_id = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    first = next(name for name, parameter in model.named_parameters() if parameter is embeddings)
    return first, first if head is embeddings else by_id[id(head)]
