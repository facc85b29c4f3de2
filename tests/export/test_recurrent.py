# SPDX-License-Identifier: Apache-2.0
"""A traced layer with recurrent states has the nodes GatedDelta and ConvRows, and computes what torch does."""

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from speccompile.core.specs import LENGTHS, STATE_LENGTHS, SURE_NODES, TREE_MASK, GraphSpec, TensorSpec  # noqa: E402
from speccompile.export.recurrent import conv_rows, gated_delta  # noqa: E402
from speccompile.export.trace import trace_module  # noqa: E402
from speccompile.ops.registry import attach_functions  # noqa: E402
from tests.lab.graphs import open_session  # noqa: E402

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL, PENDING = 2, 4, 6, 5, 4, 3
KEYS, VALUES = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
CHANNELS, WIDTH = 2 * KEYS + VALUES, KEYS + VALUES + 2 * VALUE_HEADS


class Layer(nn.Module):
    """Both ops in the order of a model: convolution, then recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(CHANNELS, CHANNELS, KERNEL, groups=CHANNELS, bias=False)
        self.gates = nn.Linear(CHANNELS, 2 * VALUE_HEADS)
        self.register_buffer("bias", torch.zeros(CHANNELS))

    def forward(self, x, rows, state, pending, lengths, state_lengths, sure_nodes, tree_mask):  # type: ignore[no-untyped-def]
        step = (lengths, state_lengths, sure_nodes, tree_mask)
        mixed, new_rows = conv_rows(x, self.conv.weight[:, 0], self.bias, rows, *step, 1)
        q, k, v = mixed.split([KEYS, KEYS, VALUES], dim=-1)
        g, beta = self.gates(x).sigmoid().chunk(2, dim=-1)
        heads = (KEY_HEADS, VALUE_HEADS)
        out, new_state, new_pending = gated_delta(q, k, v, -g, beta, state, pending, *step, *heads, 0.25, 1)
        return out, new_rows, new_state, new_pending


COUNTS = tuple(TensorSpec(name, ("batch",), "int64") for name in (LENGTHS, STATE_LENGTHS, SURE_NODES))
STEP = (*COUNTS, TensorSpec(TREE_MASK, ("batch", "nodes", "nodes"), "bool"))
STATES = (
    TensorSpec("conv_rows.0", ("batch", KERNEL - 1 + PENDING, CHANNELS), "float32"),
    TensorSpec("state.0", ("batch", VALUE_HEADS, KEY_DIM, VALUE_DIM), "float32"),
    TensorSpec("pending.0", ("batch", PENDING, WIDTH), "float32"),
)
SPEC = GraphSpec(
    "layer",
    (TensorSpec("x", ("batch", "nodes", CHANNELS), "float32"), *STATES, *STEP),
    (
        TensorSpec("y", ("batch", "nodes", VALUES), "float32"),
        *(TensorSpec(f"{t.name}.updated", t.dims, t.dtype) for t in STATES),
    ),
)


def _call(batch: int, nodes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {"batch": batch, "nodes": nodes}
    shapes = {t.name: [sizes.get(d, d) for d in t.dims] for t in SPEC.inputs if t.dtype == "float32"}
    made = {name: (0.3 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    made[LENGTHS] = np.arange(batch) * 3
    made[STATE_LENGTHS] = np.maximum(made[LENGTHS] - 2, 0)
    made[SURE_NODES] = np.arange(batch) % 2 * nodes
    made[TREE_MASK] = np.tile(np.tri(nodes, dtype=np.bool_), (batch, 1, 1))
    for slot in range(0, batch, 2):
        made[TREE_MASK][slot, 2:, 1:2] = False  # a second path
    return made


@pytest.fixture(scope="module")
def traced() -> tuple[Layer, ir.Model]:
    torch.manual_seed(0)
    layer, batch, nodes = Layer().eval(), torch.export.Dim("batch"), torch.export.Dim("nodes")
    example = tuple(torch.from_numpy(array) for array in _call(2, 3).values())
    dims = [{0: batch, 1: nodes}, *({0: batch} for _ in range(6)), {0: batch, 1: nodes, 2: nodes}]
    return layer, trace_module(layer, example, dims, SPEC, "a layer")


def test_each_op_becomes_one_node_with_its_attributes(traced):
    ours = {node.op_type: node for node in traced[1].graph if node.domain == "speccompile"}
    assert list(ours) == ["ConvRows", "GatedDelta"]
    values = {n: {a.name: a.value for a in node.attributes.values()} for n, node in ours.items()}
    assert values["ConvRows"] == {"activation": 1}
    heads = {"num_key_heads": KEY_HEADS, "num_value_heads": VALUE_HEADS}
    assert values["GatedDelta"] == {**heads, "scale": 0.25, "delta": 1}


@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (3, 5)])
def test_the_graph_computes_what_the_layer_does(traced, batch, nodes):
    layer, model = traced
    attach_functions(model)
    call = _call(batch, nodes)
    with torch.no_grad():
        wanted = layer(*(torch.from_numpy(array) for array in call.values()))
    got = open_session(ir.to_proto(model)).run(None, call)
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), atol=2e-6)
