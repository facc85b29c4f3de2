# SPDX-License-Identifier: Apache-2.0
"""Replaces methods of transformers' models, by the table of `speccompile.export.adapted_models`.

With the attention implementation `eager` the own methods run, so that both can be compared before the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from speccompile.export.adapted_models import ADAPTERS, Adapter


def is_adapted(model_type: str) -> bool:
    """Whether models of this type are built with their own attention, for `adapt_model` to replace."""
    return model_type in ADAPTERS


def adapt_model(model: Any) -> None:
    """Replaces the methods of every layer of a model of a type in `ADAPTERS` that need it; numbers the layers."""
    for adapter in ADAPTERS[model.config.model_type]:
        found = [m for m in model.modules() if type(m).__name__ == adapter.module]
        for index, module in enumerate(found):
            module.layer_idx = index
            if adapter.form and not hasattr(module, adapter.form):
                continue
            setattr(module, adapter.method, MethodType(_switch(adapter, model.config, module), module))


def set_attention(model: Any, implementation: str) -> None:
    if is_adapted(model.config.model_type):
        model.config._attn_implementation = implementation
    else:
        model.set_attn_implementation(implementation)


def _switch(adapter: Adapter, config: Any, module: nn.Module) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = getattr(module, adapter.method)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if config._attn_implementation == "eager":
            return own(*args, **kwargs)
        return adapter.run(self, ALL_ATTENTION_FUNCTIONS[config._attn_implementation], *args, **kwargs)

    return run
