# SPDX-License-Identifier: Apache-2.0
"""GatedDelta and ConvRows against the formulas of transformers and torch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from speccompile.core.specs import LENGTHS, STATE_LENGTHS, SURE_NODES  # noqa: E402
from tests.ops.state_lab import assert_near, body_run, conv_layer, delta_layer, fresh, random_step  # noqa: E402

pytestmark = pytest.mark.export


@pytest.mark.parametrize("key_heads", [1, 2])
def test_the_delta_rule_is_that_of_transformers(key_heads):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    layer = delta_layer(key_heads=key_heads, group=3, key_dim=8, value_dim=12)
    tokens, heads = np.arange(20), key_heads * 3
    rows = {name: torch.from_numpy(table[tokens][None]) for name, table in layer.table.items()}
    q, k = (rows[name].view(1, 20, key_heads, 8) for name in "qk")
    arguments = (q, k, rows["v"].view(1, 20, heads, 12), rows["g"], rows["beta"])
    wanted, state = torch_recurrent_gated_delta_rule(*arguments, output_final_state=True)
    for run in (layer.twin, body_run(layer)):
        out, held = fresh(layer, run, tokens)
        assert_near(out, wanted[0].flatten(1).numpy())
        assert_near(held, state[0].numpy())


def test_a_state_is_continued_as_transformers_does():
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    layer = delta_layer()
    inputs = random_step(layer, np.random.default_rng(3), 3, 4)
    inputs[STATE_LENGTHS] = inputs[LENGTHS] = np.array([0, 5, 9])
    inputs[SURE_NODES] = np.full(3, 4)
    given = {name: torch.from_numpy(array) for name, array in inputs.items()}
    q, k = (given[name].view(3, 4, 2, 6) for name in "qk")
    initial = given["state"].clone()
    initial[0] = 0
    arguments = (q, k, given["v"].view(3, 4, 4, 5), given["g"], given["beta"])
    wanted, state = torch_recurrent_gated_delta_rule(*arguments, initial_state=initial, output_final_state=True)
    out, updated, _ = layer.twin(inputs)
    assert_near(out, wanted.flatten(2).numpy())
    assert_near(updated, state.numpy())


@pytest.mark.parametrize("activation", [0, 1])
def test_the_convolution_is_that_of_torch(activation):
    layer = conv_layer(channels=7, kernel=4, activation=activation)
    tokens = np.arange(12)
    x = torch.from_numpy(layer.table["x"][tokens]).T[None]
    weight, bias = (torch.from_numpy(layer.constants[name]) for name in ("weight", "bias"))
    wanted = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=3, groups=7)[0, :, :12].T
    wanted = torch.nn.functional.silu(wanted) if activation else wanted
    for run in (layer.twin, body_run(layer)):
        out, held = fresh(layer, run, tokens)
        assert_near(out, wanted.numpy())
        np.testing.assert_array_equal(held, layer.table["x"][tokens[-3:]])
