# SPDX-License-Identifier: Apache-2.0
"""TensorRT's bodies of the guessing ops: the twins' numbers, and plans that build."""

from __future__ import annotations

import numpy as np
import pytest

from speccompile.ops.guesses import node_laws, top_tokens
from tests.ops.op_lab import session_of
from tests.ops.tensorrt.lab import Parsed, body_model, random_feeds

ROWS = ((1,), (2,), (4,))


def nodes_of(vocab: int) -> tuple[tuple[int, ...], ...]:
    return (1, 1, vocab), (2, 4, vocab), (4, 8, vocab)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_guesses_equal_the_twins(dtype: str) -> None:
    session = session_of(body_model("TopTokens", {"vocab": 97, "guesses": 8}, dtypes={"logits": dtype}))
    logits = random_feeds(97, 4, 1)["logits"].astype(dtype)
    expected = top_tokens(logits.astype(np.float32))
    got = session.run(None, {"logits": logits})
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_allclose(got[1], expected[1], atol=1e-6)


def test_laws_are_never_a_dummy() -> None:
    session = session_of(body_model("NodeLaws", {"vocab": 97}))
    feeds = random_feeds(97, 6, 2)
    (expected,) = node_laws(**feeds)
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, atol=2e-6)
    greedy = {**feeds, "temperature": np.zeros(6, np.float32)}
    (laws,) = session.run(None, greedy)
    np.testing.assert_array_equal(laws.argmax(-1), feeds["logits"].argmax(-1))
    assert laws.shape == (6, 2, 97) and (laws.sum(-1) == 1).all()


@pytest.mark.parametrize("vocab", [200, 33000])
def test_guesses_build(vocab: int) -> None:
    model = body_model("TopTokens", {"vocab": vocab, "guesses": 8}, dtypes={"logits": "float16"})
    made = Parsed(model, {"logits": nodes_of(vocab)})
    assert made.plan_bytes > 0 and made.kinds.count("TOPK") == 1
    assert not {k for k in made.kinds if "PLUGIN" in k or "LOOP" in k or "CONDITION" in k}


def test_laws_build() -> None:
    model = body_model("NodeLaws", {"vocab": 4097}, dtypes={"logits": "bfloat16"})
    made = Parsed(model, {"logits": nodes_of(4097), "temperature": ROWS, "top_k": ROWS, "top_p": ROWS})
    assert made.plan_bytes > 0 and not {k for k in made.kinds if "PLUGIN" in k or k == "TOPK"}
