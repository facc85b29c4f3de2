# SPDX-License-Identifier: Apache-2.0
"""Drafts of our own with caches -> the neutral graph of a decoder, which outputs logits; the tail is attached later."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from speccompile.core.specs import SHARED_ROWS, GraphSpec, TensorSpec
from speccompile.export.heads import HEADS_CLEANUP
from speccompile.export.trace import trace_module
from speccompile.export.weights import name_weights, names_by_address, share_weights
from speccompile.graph_kinds.features import STATES
from speccompile.passes.base import Pass, run_pipeline

# None is 0 or 1, which torch would treat as constants.
_EXAMPLE_SIZES = {"batch": 2, "nodes": 3, "scored": 2, "max_seq": 16, SHARED_ROWS: 12, STATES: 4}


def export_cached_draft(
    module: nn.Module, spec: GraphSpec, progress: Callable[[str], None], cleanup: tuple[Pass, ...] = HEADS_CLEANUP
) -> ir.Model:
    """Traces a draft and cleans the trace; the neutral graph's weights refer to torch's memory.

    Args:
        module: takes the inputs of `spec` in order, its caches as one list, and returns its outputs.
    """
    progress("trace")
    num = len(spec.inputs) - len(spec.caches)
    example = [_example(tensor) for tensor in spec.inputs]
    sizes = {name: torch.export.Dim(name, min=1) for name in _EXAMPLE_SIZES}
    shapes = [{i: sizes[d] for i, d in enumerate(t.dims) if isinstance(d, str)} for t in spec.inputs]
    names = names_by_address(module)
    graph = trace_module(module.eval(), (*example[:num], example[num:]), (*shapes[:num], shapes[num:]), spec, spec.name)
    share_weights(graph)
    name_weights(graph, names)
    run_pipeline(graph, cleanup, progress)
    return graph


def _example(tensor: TensorSpec) -> torch.Tensor:
    shape = [d if isinstance(d, int) else _EXAMPLE_SIZES[d] for d in tensor.dims]
    made = torch.ones if tensor.dtype == "bool" else torch.zeros
    return made(shape, dtype=getattr(torch, tensor.dtype))


class RotaryTables(nn.Module):
    """Rotary positions from tables, as one operator; the numbers of `layers.rotate`."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, head_dim: int, theta: float, num_positions: int) -> None:
        super().__init__()
        half = head_dim // 2
        frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
        # As the trained angles: rounded to float32, with correctly rounded cosines.
        angles = (torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies).numpy().astype(np.float64)
        self.register_buffer("cos", torch.from_numpy(np.cos(angles).astype(np.float32)), persistent=False)
        self.register_buffer("sin", torch.from_numpy(np.sin(angles).astype(np.float32)), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x [batch, heads, nodes, head_dim] by positions [batch, nodes] int64."""
        return torch.onnx.ops.rotary_embedding(x, self.cos, self.sin, positions)
