# SPDX-License-Identifier: Apache-2.0
"""The target's first layers as a model of their own, with a head in the place of the final norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from speccompile.core.specs import ModelDims
from speccompile.errors import ExportError
from speccompile.export.wrapper import find_layers
from speccompile.speculators.early_exit.heads import ExitHead, ExitSizes

RANDOM_SEED = 0


def make_head(sizes: ExitSizes, weights: Mapping[str, torch.Tensor] | None) -> ExitHead:
    """A head in float32; without weights a random one, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        head = ExitHead(sizes)
    if weights is not None:
        head.load_state_dict({name: tensor.to(torch.float32) for name, tensor in weights.items()})
    head.eval().requires_grad_(False)
    return head


def cut_model(model: Any, dims: ModelDims, num_layers: int, head: ExitHead | None) -> ModelDims:
    """Keep the first layers of a transformers model, in place.

    Args:
        model: a causal LM.
        dims: its sizes.
        num_layers: layers kept.
        head: stands in for the final norm; None: the norm stays.

    Returns:
        The sizes of what is left.

    Raises:
        ExportError: the norm cannot be found.
    """
    layers = find_layers(model, dims.num_layers)
    del layers[num_layers:]
    model.config.num_hidden_layers = num_layers
    if head is not None:
        base = model.base_model
        if not isinstance(getattr(base, "norm", None), torch.nn.Module):
            todo = "Draft with the layers alone: leave speculator.model out."
            raise ExportError(type(model).__name__, "no module `norm` behind its layers", "the final norm", todo)
        base.norm = head
    return replace(dims, num_layers=num_layers)
