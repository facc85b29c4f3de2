# SPDX-License-Identifier: Apache-2.0
"""Replaces the forward of layers by class: recurrent ones, short convolutions, and attention that no op expresses.

The own forward still runs where the model runs without our caches, so the two can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from speccompile.export import delta_layers, mamba_layers

_CHANGES = {**delta_layers.CHANGES, **mamba_layers.CHANGES}


def replace_layers(model: Any) -> None:
    """Replace the forward of the layers that have one of ours; a model without any stays as it is."""
    for module in model.modules():
        changes = _CHANGES.get(type(module).__name__)
        if changes is not None:
            prepare, run, is_ours = changes
            prepare(module)
            module.forward = MethodType(_switch(module.forward, run, is_ours), module)


def _switch(own: Callable[..., Any], run: Callable[..., Any], is_ours: Callable[[Any], bool]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs) if is_ours(self) else own(*args, **kwargs)

    return forward
