# SPDX-License-Identifier: Apache-2.0
"""Drafts of our own -> neutral graphs: heads of one run, and drafts with caches, whose tail is attached later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from speccompile.core.specs import CHAIN_PROBS, GraphSpec, TensorSpec
from speccompile.export.trace import trace_draft
from speccompile.passes.base import Pass
from speccompile.passes.cleanup import remove_dead, share_common_subexpressions
from speccompile.passes.edit import Editor
from speccompile.passes.fold_weights import fold_weights
from speccompile.passes.fuse_rms_norm import fuse_rms_norm
from speccompile.passes.simplify_reshapes import simplify_reshapes
from speccompile.passes.unflatten_linears import unflatten_linears

HEADS_CLEANUP: tuple[Pass, ...] = (
    remove_dead,
    share_common_subexpressions,
    fuse_rms_norm,
    unflatten_linears,
    simplify_reshapes,
    fold_weights,
    share_common_subexpressions,
    remove_dead,
)


def export_heads(module: nn.Module, spec: GraphSpec, progress: Callable[[str], None]) -> ir.Model:
    """Traces a drafter and cleans the trace; the neutral graph's weights refer to torch's memory.

    Args:
        module: takes the inputs of `spec` in order and returns its outputs; instead of the distributions of a chain the
            distribution of each draft [batch, vocab] one by one. Caches of the target come as one list.
        spec: a `heads_spec`, or one of `graph_kinds.heads`; the graph's inputs and outputs.
    """
    groups = (len(spec.borrowed),) if spec.borrowed else ()

    def finish(graph: ir.Model) -> None:
        if _num_drafts(spec):
            _join_dists(graph, spec)

    return trace_draft(module, spec, progress, HEADS_CLEANUP, groups, _apart(spec), finish)


def _num_drafts(spec: GraphSpec) -> int:
    rows = next((t.dims[1] for t in spec.outputs if t.name == CHAIN_PROBS), 1)
    assert isinstance(rows, int)
    return rows - 1


def _apart(spec: GraphSpec) -> GraphSpec:
    dists = [TensorSpec(f"{CHAIN_PROBS}.{i}", ("batch", spec.vocab_size), "float32") for i in range(_num_drafts(spec))]
    return replace(spec, outputs=(*(t for t in spec.outputs if t.name != CHAIN_PROBS), *dists))


def _join_dists(model: ir.Model, spec: GraphSpec) -> None:
    """Joins the distributions into one output; the unused row of the root repeats the first.

    Their last dim is dynamic: where every slot is greedy a distribution is a dummy of one entry.
    """
    num, wanted = _num_drafts(spec), spec.output(CHAIN_PROBS)
    dists = model.graph.outputs[-num:]
    edit = Editor(model)
    rows = []
    for dist in dists:
        dist.shape = ir.Shape(["batch", wanted.dims[2]])
        row = edit.op("Unsqueeze", dist, edit.ints([1]))
        row.type, row.shape = dist.type, ir.Shape(["batch", 1, wanted.dims[2]])
        rows.append(row)
    joined = edit.op("Concat", rows[0], *rows, axis=1)
    joined.name, joined.type, joined.shape = wanted.name, dists[0].type, ir.Shape(list(wanted.dims))
    for _ in dists:  # not as a slice: onnx-ir would still treat them as outputs, and omit their types when saved
        model.graph.outputs.pop()
    model.graph.outputs.append(joined)


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
