# SPDX-License-Identifier: Apache-2.0
"""TensorRT-RTX parses and builds the bodies of the ops with recurrent states, with dynamic batch and nodes."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from speccompile.core.specs import LENGTHS, STATE_LENGTHS, SURE_NODES
from speccompile.ops.registry import attach_functions
from tests.ops.op_lab import model_of
from tests.ops.state_lab import Layer, conv_layer, delta_layer
from tests.ops.tensorrt.lab import Parsed, Shape

NODES = 8


def state_model(layer: Layer) -> onnx.ModelProto:
    """A model of the layer's op with the body for TensorRT; batch and nodes are dynamic."""
    sizes = {tensor.name: tensor.dims for tensor in layer.op.inputs}
    known = {name: table.shape[-1:] for name, table in layer.table.items()}
    known |= {name: array.shape for name, array in layer.constants.items()} | layer.states
    pins = {
        dim: size for name, dims in known.items() for dim, size in zip(sizes[name][-len(dims) :], dims, strict=True)
    }
    proto = model_of(layer.op.name, pins, **layer.attributes)
    del proto.functions[:]
    model = ir.from_proto(proto)
    assert attach_functions(model, dialect="tensorrt") == 1
    return ir.to_proto(model)


def profile_of(layer: Layer) -> dict[str, tuple[Shape, Shape, Shape]]:
    """Batch 1 to 4 and 1 to NODES nodes."""
    rows = {name: table.shape[1:] for name, table in layer.table.items()}
    made = {name: ((1, 1, *tail), (2, 4, *tail), (4, NODES, *tail)) for name, tail in rows.items()}
    for name, dims in (*layer.states.items(), (LENGTHS, ()), (STATE_LENGTHS, ()), (SURE_NODES, ())):
        made[name] = ((1, *dims), (2, *dims), (4, *dims))
    return made


@pytest.mark.parametrize("delta", [0, 1])
def test_the_recurrence_builds_as_loops(delta: int) -> None:
    layer = delta_layer(key_heads=2, group=2, key_dim=32, value_dim=16, pending=4, delta=delta)
    made = Parsed(state_model(layer), profile_of(layer))
    assert made.plan_bytes > 0 and not {kind for kind in made.kinds if "PLUGIN" in kind}
    assert made.kinds.count("TRIP_LIMIT") == 2  # the pending rows, the nodes


@pytest.mark.parametrize("activation", [0, 1])
def test_the_convolution_builds_without_a_loop(activation: int) -> None:
    layer = conv_layer(channels=48, pending=4, activation=activation)
    made = Parsed(state_model(layer), profile_of(layer))
    assert made.plan_bytes > 0 and not {kind for kind in made.kinds if "PLUGIN" in kind or kind == "TRIP_LIMIT"}
