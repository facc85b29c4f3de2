# SPDX-License-Identifier: Apache-2.0

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.core.tree import TokenTree
from speccompile.ops.cached_attention import cached_attention
from speccompile.ops.kv_rollback import kv_rollback
from speccompile.ops.registry import OPS, attach_functions, functions, reference_ops, with_uses
from tests.lab.graphs import open_session
from tests.ops.op_lab import model_of

TOLERANCE = 2e-6  # of outputs of size 1: float32 sums in another order


def _attention_case(rng: np.random.Generator) -> dict[str, np.ndarray]:
    batch, nodes, kv_heads, group = (int(rng.integers(1, n)) for n in (4, 6, 4, 4))
    max_seq, head_dim = int(rng.integers(nodes, 90)), int(rng.choice([1, 3, 8]))
    parents = [[-1, *(int(rng.integers(0, i)) for i in range(1, nodes))] for _ in range(batch)]

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    return {
        "q": normal(batch, kv_heads * group, nodes, head_dim),
        "k": normal(batch, kv_heads, nodes, head_dim),
        "v": normal(batch, kv_heads, nodes, head_dim),
        "k_cache": normal(batch, kv_heads, max_seq, head_dim),
        "v_cache": normal(batch, kv_heads, max_seq, head_dim),
        "lengths": rng.integers(0, max_seq - nodes + 1, batch),
        "tree_mask": TokenTree.tree(np.zeros((batch, nodes), np.int64), parents).mask(),
    }


def _naive(case: dict[str, np.ndarray], scale: float, softcap: float, window: int) -> np.ndarray:
    """Row by row in float64, from the definition: a sink is one more score with a value of zero."""
    q, k, v = (case[n].astype(np.float64) for n in ("q", "k", "v"))
    batch, heads, nodes, head_dim = q.shape
    out = np.zeros((batch, nodes, heads, head_dim))
    for b, h, i in np.ndindex(batch, heads, nodes):
        kv = h * k.shape[1] // heads
        length, mask = case["lengths"][b], case["tree_mask"][b]
        depth = np.tril(mask).sum(-1) - 1
        keys = [(case["k_cache"][b, kv, r], case["v_cache"][b, kv, r], r) for r in range(length)]
        keys += [(k[b, kv, j], v[b, kv, j], length + depth[j]) for j in range(nodes) if mask[i, j]]
        position = length + depth[i]
        keys = [key for key in keys if window == 0 or position - key[2] < window]
        scores = np.array([q[b, h, i] @ key[0] for key in keys]) * scale
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        if "sinks" in case:
            scores = np.append(scores, case["sinks"][h])
            keys.append((np.zeros(head_dim), np.zeros(head_dim), 0))
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights @ np.array([key[1] for key in keys]) / weights.sum()
    return out


@pytest.mark.parametrize(
    ("op", "scale", "softcap", "window"),
    [
        ("CachedAttention", 0.3, 0.0, 0),
        ("CachedAttention", 1.0, 1.5, 0),
        ("CachedAttention", 0.5, 0.0, 3),
        ("CachedAttention", 0.2, 4.0, 1),
        ("SinkAttention", 0.3, 0.0, 0),
        ("SinkAttention", 1.0, 0.0, 3),
    ],
)
def test_cached_attention(op, scale, softcap, window):
    rng = np.random.default_rng(window)
    has_sinks = op == "SinkAttention"
    model = model_of(op, scale=scale, window=window, **({} if has_sinks else {"softcap": softcap}))
    session, evaluator = open_session(model), ReferenceEvaluator(model)
    for turn in range(12):
        case = _attention_case(rng)
        if turn % 4 == 3:  # an image: all nodes but the first see each other both ways
            case["tree_mask"] = np.broadcast_to(np.tri(case["q"].shape[2], dtype=bool), case["tree_mask"].shape).copy()
            case["tree_mask"][:, 1:, 1:] = True
        if has_sinks:
            case["sinks"] = rng.normal(size=case["q"].shape[1]).astype(np.float32) * 3
        expected = cached_attention(**case, scale=scale, softcap=softcap, window=window)
        np.testing.assert_allclose(expected[0], _naive(case, scale, softcap, window), atol=TOLERANCE)
        for slot, length in enumerate(case["lengths"]):
            end = length + case["k"].shape[2]
            for new, old, rows in ((expected[1], "k_cache", "k"), (expected[2], "v_cache", "v")):
                np.testing.assert_array_equal(new[slot, :, length:end], case[rows][slot])
                np.testing.assert_array_equal(new[slot, :, end:], case[old][slot, :, end:])
                np.testing.assert_array_equal(new[slot, :, :length], case[old][slot, :, :length])
        for got in (session.run(None, case), evaluator.run(None, case)):
            np.testing.assert_allclose(got[0], expected[0], atol=TOLERANCE)
            np.testing.assert_array_equal(got[1], expected[1])
            np.testing.assert_array_equal(got[2], expected[2])


def test_kv_rollback():
    model = model_of("KVRollback")
    session, evaluator = open_session(model), ReferenceEvaluator(model)
    rng = np.random.default_rng(0)
    for _ in range(40):
        batch, nodes, max_seq = int(rng.integers(1, 9)), int(rng.integers(1, 9)), int(rng.integers(9, 100))
        cache = rng.normal(size=(batch, 2, max_seq, 3)).astype(np.float32)
        lengths = rng.integers(0, max_seq - nodes + 1, batch)
        path = np.full((batch, nodes), -1)
        for slot in range(batch):
            kept = np.flatnonzero(rng.random(nodes) < 0.5)
            path[slot, : len(kept)] = kept
        (expected,) = kv_rollback(cache, lengths, path)
        for slot, length in enumerate(lengths):
            kept = path[slot][path[slot] >= 0]
            np.testing.assert_array_equal(expected[slot, :, length : length + len(kept)], cache[slot][:, length + kept])
            np.testing.assert_array_equal(expected[slot, :, :length], cache[slot, :, :length])
        feeds = {"cache": cache, "lengths": lengths, "path": path}
        for got in (session.run(None, feeds), evaluator.run(None, feeds)):
            np.testing.assert_array_equal(got[0], expected)


def test_kv_rollback_works_in_place(capfd):
    """ONNX Runtime warns whenever TensorScatter has to copy the cache."""
    options = ort.SessionOptions()
    options.log_severity_level = 2
    session = ort.InferenceSession(
        model_of("KVRollback").SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    cache = np.random.default_rng(1).normal(size=(1, 2, 50, 4)).astype(np.float32)
    (expected,) = kv_rollback(cache, np.array([30]), np.array([[0, 2, 5, -1]]))
    value = ort.OrtValue.ortvalue_from_numpy(cache)
    binding = session.io_binding()
    binding.bind_ortvalue_input("cache", value)
    binding.bind_cpu_input("lengths", np.array([30]))
    binding.bind_cpu_input("path", np.array([[0, 2, 5, -1]]))
    binding.bind_ortvalue_output("updated", value)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(value.numpy(), expected)
    assert "in-place" not in capfd.readouterr().err


def test_functions_come_with_what_they_call():
    assert with_uses(["SampleToken"]) == ["FirstMaxInBlocks", "FirstMax", "Warp", "DrawInBlocks", "Draw", "SampleToken"]
    assert [f.name for f in functions(["KVRollback"])] == ["KVRollback"]
    assert {f.name for f in functions()} == set(OPS)


def test_attached_functions_run():
    proto = model_of("CachedAttention")
    del proto.functions[:], proto.graph.node[0].attribute[:]
    del proto.opset_import[1:]
    model = ir.from_proto(proto)
    assert attach_functions(model) == 1
    assert attach_functions(model) == 0
    case = _attention_case(np.random.default_rng(5))
    expected = cached_attention(**case)
    attached = ir.to_proto(model)
    for got in (open_session(attached).run(None, case), ReferenceEvaluator(attached).run(None, case)):
        np.testing.assert_allclose(got[0], expected[0], atol=TOLERANCE)


def test_a_model_without_our_ops_is_left_alone():
    empty = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 24}), ir_version=11)
    assert attach_functions(empty) == 0
    assert empty.opset_imports == {"": 24} and not empty.functions


def test_reference_ops_are_the_twins():
    proto = model_of("CachedAttention", scale=0.4, window=2)
    del proto.functions[:]
    case = _attention_case(np.random.default_rng(6))
    got = ReferenceEvaluator(proto, new_ops=reference_ops()).run(None, case)
    expected = cached_attention(**case, scale=0.4, window=2)
    for mine, twin in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, twin)
