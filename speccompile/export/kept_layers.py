# SPDX-License-Identifier: Apache-2.0
"""Some of a model's decoder layers as a model of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speccompile.core.dims import ModelDims
from speccompile.export.wrapper import find_layers

_BY_LAYER = ("layer_types", "layers_block_type", "no_rope_layers", "attention_layers")  # of a config: an entry a layer


def keep_layers(model: Any, dims: ModelDims, kept: Sequence[int]) -> ModelDims:
    """Keeps the layers of indices `kept`, rising from 0, in place, numbers them anew, and returns the new sizes.

    Raises:
        ExportError: the layers cannot be found.
    """
    layers, config = find_layers(model, dims.num_layers), model.config
    for index in sorted(set(range(dims.num_layers)) - set(kept), reverse=True):
        del layers[index]
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = index
    for name in _BY_LAYER:
        if isinstance(held := getattr(config, name, None), list) and len(held) == dims.num_layers:
            setattr(config, name, [held[index] for index in kept])
    config.num_hidden_layers = len(kept)
    return dims.kept(kept)
