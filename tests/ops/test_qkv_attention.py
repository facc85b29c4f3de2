# SPDX-License-Identifier: Apache-2.0
"""The twin of each QkvAttention op against its definition, and the function bodies against the twin."""

from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from tests.ops.op_lab import model_of, session_of
from tests.ops.qkv_lab import Call, Sizes, naive, random_call

TOLERANCE = 3e-6  # of outputs of size 1: float32 sums in another order; seen at most 1.5e-6

KINDS: list[dict[str, Any]] = [
    {},
    {"rotary": True},
    {"rotary": True, "interleaved": 1},
    {"norm": True, "epsilon": 1e-3},
    {"norm": True, "rotary": True},
    {"rotary": True, "softcap": 1.5},
    {"rotary": True, "window": 3},
    {"window": 1},
    {"rotary": True, "window": 3, "has_image": True},
]


def calls_of(kind: dict[str, Any]) -> list[Call]:
    rng = np.random.default_rng(len(kind))
    sizes = [
        Sizes(),
        Sizes(batch=1, nodes=1, kv_heads=1, group=1, head_dim=6, max_seq=1),
        Sizes(batch=3, nodes=7, kv_heads=1, group=4, head_dim=10, max_seq=31, rotary_dim=4),
    ]
    calls = [random_call(rng, s, **kind) for s in sizes]
    calls.append(random_call(rng, sizes[0], lengths=np.array([0, 17]), **kind))  # empty, and full to the last row
    return calls


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_twin_and_body_follow_the_definition(kind):
    for call in calls_of(kind):
        expected = call.twin()
        np.testing.assert_allclose(expected[0], naive(call), atol=TOLERANCE)
        model = model_of(call.op.name, **call.attributes)
        for got in (session_of(model).run(None, call.inputs), ReferenceEvaluator(model).run(None, call.inputs)):
            np.testing.assert_allclose(got[0], expected[0], atol=TOLERANCE)
            for new, twin in zip(got[1:], expected[1:], strict=True):
                np.testing.assert_allclose(new, twin, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_only_the_rows_of_the_nodes_are_written(kind):
    for call in calls_of(kind):
        _, *updated = call.twin()
        nodes = call.inputs["tree_mask"].shape[1]
        for new, old in zip(updated, (call.inputs["k_cache"], call.inputs["v_cache"]), strict=True):
            for slot, length in enumerate(call.inputs["lengths"]):
                np.testing.assert_array_equal(new[slot, :, :length], old[slot, :, :length])
                np.testing.assert_array_equal(new[slot, :, length + nodes :], old[slot, :, length + nodes :])
                assert (new[slot, :, length : length + nodes] != old[slot, :, length : length + nodes]).all()


@pytest.mark.parametrize("group", [1, 2])
def test_the_body_gives_a_chain_the_bits_of_single_steps(group):
    sizes = Sizes(batch=1, nodes=9, kv_heads=2, group=group, head_dim=16, max_seq=40)
    call = random_call(np.random.default_rng(group), sizes, rotary=True, is_chain=True)
    session, inputs = session_of(model_of(call.op.name, **call.attributes)), dict(call.inputs)
    whole, *_ = session.run(None, call.inputs)
    for node in range(sizes.nodes):
        inputs["qkv"] = call.inputs["qkv"][:, node : node + 1]
        inputs |= {"lengths": call.inputs["lengths"] + node, "tree_mask": np.ones((1, 1, 1), bool)}
        out, inputs["k_cache"], inputs["v_cache"] = session.run(None, inputs)
        np.testing.assert_array_equal(out[:, 0], whole[:, node])
