# SPDX-License-Identifier: Apache-2.0
"""Weights are freed with the graph that refers to them: the next export needs the memory."""

import gc
import weakref

import torch
from torch import nn

from speccompile.core.specs import GraphSpec, TensorSpec
from speccompile.export.trace import trace_module


class Halves(nn.Module):
    """A linear whose result is cut into halves: onnxscript has a rule for that, which visits slices alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.cat((-y[:, 4:], y[:, :4]), 1)


def test_weights_are_freed_with_the_graph():
    module = Halves().eval()
    held = [weakref.ref(parameter) for parameter in module.parameters()]
    x, y = (TensorSpec(name, ("batch", 8), "float32") for name in "xy")
    spec = GraphSpec("halves", (x,), (y,))
    model = trace_module(module, (torch.zeros(3, 8),), ({0: torch.export.Dim("batch", min=1)},), spec, "halves")
    assert len(model.graph.initializers) >= 2
    del module, model
    gc.collect()
    assert [parameter() for parameter in held] == [None, None]
