# SPDX-License-Identifier: Apache-2.0
"""The twin of each QkvAttention op against its definition, and the function bodies against the twin."""

from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.backends.onnxruntime.attention_cases import (
    AttentionSizes,
    attention_inputs,
    cross_attributes,
    cross_inputs,
)
from speccompile.ops.cached_attention import CACHED_ATTENTION, SHARED_ATTENTION
from speccompile.ops.cross_attention import CROSS_ATTENTION, ROTARY_CROSS_ATTENTION
from tests.lab.graphs import open_session
from tests.ops.op_lab import model_of
from tests.ops.qkv_lab import Call, Sizes, naive, naive_cross, random_call

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
        for got in (open_session(model).run(None, call.inputs), ReferenceEvaluator(model).run(None, call.inputs)):
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
    session, inputs = open_session(model_of(call.op.name, **call.attributes)), dict(call.inputs)
    whole, *_ = session.run(None, call.inputs)
    for node in range(sizes.nodes):
        inputs["qkv"] = call.inputs["qkv"][:, node : node + 1]
        inputs |= {"lengths": call.inputs["lengths"] + node, "tree_mask": np.ones((1, 1, 1), bool)}
        out, inputs["k_cache"], inputs["v_cache"] = session.run(None, inputs)
        np.testing.assert_array_equal(out[:, 0], whole[:, node])


SIZES = [
    AttentionSizes(),
    AttentionSizes(batch=1, nodes=1, num_kv_heads=1, group=1, head_dim=6, max_seq=1, rotary_dim=6),
    AttentionSizes(batch=3, nodes=5, num_kv_heads=1, group=4, head_dim=10, max_seq=31, rotary_dim=4),
]


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_twin_and_body_of_cross_attention_follow_the_definition(sizes, interleaved):
    inputs = cross_inputs(sizes, np.random.default_rng(sizes.nodes))
    attributes = cross_attributes(sizes, interleaved)
    (expected,) = ROTARY_CROSS_ATTENTION.twin(*inputs.values(), **attributes)
    np.testing.assert_allclose(expected, naive_cross(inputs, attributes), atol=TOLERANCE)
    model = model_of("RotaryCrossAttention", **attributes)
    for got in (open_session(model).run(None, inputs), ReferenceEvaluator(model).run(None, inputs)):
        np.testing.assert_allclose(got[0], expected, atol=TOLERANCE)


def test_a_window_leaves_the_last_rows_below_the_limit():
    sizes = AttentionSizes()
    inputs = cross_inputs(sizes, np.random.default_rng(4))
    given = {name: inputs[name] for name in ("k_cache", "v_cache", "limits")}
    shape = (sizes.batch, sizes.num_heads, sizes.nodes, sizes.head_dim)
    given = {"q": np.random.default_rng(5).standard_normal(shape).astype(np.float32), **given}
    (got,) = CROSS_ATTENTION.twin(*given.values(), scale=0.3, window=4)
    for slot, limits in enumerate(given["limits"]):
        for node, limit in enumerate(limits):
            rows = [given[name][slot : slot + 1, :, max(0, limit - 4) : limit] for name in ("k_cache", "v_cache")]
            q = given["q"][slot : slot + 1, :, node : node + 1]
            (alone,) = CROSS_ATTENTION.twin(q, *rows, np.array([[rows[0].shape[2]]]), scale=0.3)
            np.testing.assert_allclose(got[slot, node], alone[0, 0], atol=TOLERANCE)
    (body,) = open_session(model_of("CrossAttention", scale=0.3, window=4)).run(None, given)
    np.testing.assert_allclose(body, got, atol=TOLERANCE)


@pytest.mark.parametrize("window", [0, 3])
def test_shared_attention_reads_what_another_layer_wrote(window):
    attributes = {"scale": 0.3, "softcap": 2.0, "window": window}
    inputs = attention_inputs(CACHED_ATTENTION, AttentionSizes(), np.random.default_rng(6), np.array([0, 30]))
    expected, k_cache, v_cache = CACHED_ATTENTION.twin(*inputs.values(), **attributes)
    given = {t.name: inputs[t.name] for t in SHARED_ATTENTION.inputs} | {"k_cache": k_cache, "v_cache": v_cache}
    (twin,) = SHARED_ATTENTION.twin(*given.values(), **attributes)
    np.testing.assert_array_equal(twin, expected)
    (body,) = open_session(model_of("SharedAttention", **attributes)).run(None, given)
    np.testing.assert_allclose(body, expected, atol=TOLERANCE)
