# SPDX-License-Identifier: Apache-2.0
"""TensorRT's bodies of the drafting ops: the twins' numbers, and plans that build."""

import numpy as np
import pytest

from speccompile.ops.candidates import node_probs, top_tokens
from tests.ops.op_lab import session_of
from tests.ops.tensorrt.lab import Parsed, body_model, random_feeds

pytestmark = pytest.mark.plan

ROWS = ((1,), (2,), (4,))


def nodes_of(vocab: int) -> tuple[tuple[int, ...], ...]:
    return (1, 1, vocab), (2, 4, vocab), (4, 8, vocab)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_candidates_equal_the_twins(dtype):
    session = session_of(body_model("TopTokens", {"vocab": 97, "candidates": 8}, dtypes={"logits": dtype}))
    logits = random_feeds(97, 4, 1)["logits"].astype(dtype)
    expected = top_tokens(logits.astype(np.float32))
    got = session.run(None, {"logits": logits})
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_allclose(got[1], expected[1], atol=1e-6)


def test_dists_are_never_a_dummy():
    session = session_of(body_model("NodeProbs", {"vocab": 97}))
    feeds = random_feeds(97, 6, 2)
    (expected,) = node_probs(**feeds)
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, atol=2e-6)
    greedy = {**feeds, "temperature": np.zeros(6, np.float32)}
    (dists,) = session.run(None, greedy)
    np.testing.assert_array_equal(dists.argmax(-1), feeds["logits"].argmax(-1))
    assert dists.shape == (6, 2, 97) and (dists.sum(-1) == 1).all()


@pytest.mark.parametrize("vocab", [200, 33000])
def test_candidates_build(vocab):
    model = body_model("TopTokens", {"vocab": vocab, "candidates": 8}, dtypes={"logits": "float16"})
    made = Parsed(model, {"logits": nodes_of(vocab)})
    assert made.plan_bytes > 0 and made.kinds.count("TOPK") == 1
    assert not {k for k in made.kinds if "PLUGIN" in k or "LOOP" in k or "CONDITION" in k}


def test_dists_build():
    model = body_model("NodeProbs", {"vocab": 4097}, dtypes={"logits": "bfloat16"})
    made = Parsed(model, {"logits": nodes_of(4097), "temperature": ROWS, "top_k": ROWS, "top_p": ROWS})
    assert made.plan_bytes > 0 and not {k for k in made.kinds if "PLUGIN" in k or k == "TOPK"}
