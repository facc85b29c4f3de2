# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter merged into a loaded transformers model, one weight after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from speccompile.checkpoints.lora import LoraAdapter, LoraChange
from speccompile.errors import CheckpointError

_NO_BIAS = "Merge it with PEFT (merge_and_unload, save_pretrained) and build the merged checkpoint."


def merge_lora(model: Any, adapter: LoraAdapter) -> None:
    """Changes the float32 weights of a transformers model in place, after `check_lora`."""
    check_lora(model, adapter)
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, key in adapter.replaced.items():
            parameters[name].copy_(torch.from_numpy(adapter.array(key)))
        for change in adapter.changes.values():
            module = modules[change.module]
            adapter.merge(change, _rows(module))
            if change.bias is not None:
                module.bias += torch.from_numpy(adapter.array(change.bias)) * change.scale


def check_lora(model: Any, adapter: LoraAdapter) -> None:
    """Compares all names and shapes of an adapter with a transformers model.

    Raises:
        CheckpointError: the adapter has a module or parameter that the model lacks, another shape, a module that is no
            linear layer or embedding, a weight that two modules share, or no factors for a module that it lists.
    """
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shared = _shared_names(parameters)
    for name, key in adapter.replaced.items():
        if name not in parameters:
            raise _foreign(adapter, name)
        adapter.expect_shape(name, adapter.shape(name), tuple(parameters[name].shape))
        if name in shared and not _is_equal(adapter.array(key), parameters[name]):
            raise _tied(adapter, name, shared[name])
    for change in adapter.changes.values():
        _check_change(adapter, change, modules.get(change.module))
        if (name := f"{change.module}.weight") in shared:
            raise _tied(adapter, name, shared[name])
    _check_listed(adapter, modules)


def _rows(module: Any) -> np.ndarray:
    weight: np.ndarray = module.weight.detach().numpy()
    return weight.T if isinstance(module, Conv1D) else weight


def _is_equal(array: np.ndarray, parameter: torch.Tensor) -> bool:
    return np.array_equal(array, parameter.detach().numpy())


def _check_change(adapter: LoraAdapter, change: LoraChange, module: Any) -> None:
    if module is None:
        raise _foreign(adapter, change.module)
    kinds = (torch.nn.Embedding,) if change.is_embedding else (torch.nn.Linear, Conv1D)
    if not isinstance(module, kinds):
        where, expected = f"{adapter.file} ({change.module})", " or ".join(kind.__name__ for kind in kinds)
        raise CheckpointError(where, f"a {type(module).__name__} in the target", expected, _NO_BIAS)
    adapter.expect_shape(change.module, change.shape, _rows(module).shape)
    if change.bias is not None and module.bias is None:
        where = f"{adapter.file} ({change.module})"
        raise CheckpointError(where, "a bias for a layer without one", "a layer with a bias", _NO_BIAS)


def _check_listed(adapter: LoraAdapter, modules: dict[str, Any]) -> None:
    held = {*adapter.changes, *(name.rpartition(".")[0] for name in adapter.replaced)}
    for name, module in modules.items():
        is_listed = any(name == end or name.endswith(f".{end}") for end in adapter.target_modules)
        if is_listed and isinstance(module, torch.nn.Linear | Conv1D) and name not in held:
            todo = "Download the adapter again, or build the model that it was trained on."
            expected = f"factors of every module in target_modules ({', '.join(adapter.target_modules)})"
            raise CheckpointError(adapter.file, f"none of {name}", expected, todo)


def _shared_names(parameters: dict[str, Any]) -> dict[str, str]:
    by_id: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        by_id.setdefault(id(parameter), []).append(name)
    groups = [names for names in by_id.values() if len(names) > 1]
    return {name: next(n for n in names if n != name) for names in groups for name in names}


def _foreign(adapter: LoraAdapter, name: str) -> CheckpointError:
    base = adapter.config.get("base_model_name_or_path")
    todo = f"Build the model that the adapter was trained on ({base!r} by its config)."
    return CheckpointError(f"{adapter.file} ({name})", "no such part in the target", "parts of the target", todo)


def _tied(adapter: LoraAdapter, name: str, other: str) -> CheckpointError:
    got = f"a change of a table that is {other} as well"
    todo = "Merge it with PEFT into an untied model, or train the adapter without that module."
    return CheckpointError(f"{adapter.file} ({name})", got, "weights that one module uses", todo)
