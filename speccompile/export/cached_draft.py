# SPDX-License-Identifier: Apache-2.0
"""Drafts of our own with caches -> the neutral graph of a decoder, which outputs logits; the tail is attached later."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from speccompile.core.specs import GraphSpec
from speccompile.export.heads import HEADS_CLEANUP
from speccompile.export.trace import trace_draft
from speccompile.passes.base import Pass


def export_cached_draft(
    module: nn.Module, spec: GraphSpec, progress: Callable[[str], None], cleanup: tuple[Pass, ...] = HEADS_CLEANUP
) -> ir.Model:
    """Traces a draft and cleans the trace; the neutral graph's weights refer to torch's memory.

    Args:
        module: takes the inputs of `spec` in order, its caches as one list, and returns its outputs.
    """
    return trace_draft(module, spec, progress, cleanup, (len(spec.caches),))


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
