# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.ops.candidates import node_probs, top_tokens
from tests.ops.op_lab import model_of, session_of

# Rows without top-p have no nucleus: 0/0 is computed there and not used.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide")

TOLERANCE = 1e-6  # of a probability: float32 softmax against float64


def logits_of(rng: np.random.Generator, batch: int, nodes: int, vocab: int) -> np.ndarray:
    """With ties in some slots."""
    logits = rng.normal(size=(batch, nodes, vocab)) * 2
    logits[::2] = np.round(logits[::2])
    return logits.astype(np.float32)


@pytest.mark.parametrize(("vocab", "num"), [(1, 1), (7, 7), (64, 3), (1000, 64)])
def test_candidates_of_the_body_equal_the_twins(vocab, num):
    model = model_of("TopTokens", num_candidates=num)
    session, evaluator = session_of(model), ReferenceEvaluator(model)
    rng = np.random.default_rng(vocab)
    for batch, nodes in ((1, 1), (3, 5), (4, 2)):
        logits = logits_of(rng, batch, nodes, vocab)
        expected = top_tokens(logits, num_candidates=num)
        assert (np.diff(expected[1], axis=-1) <= 0).all() and expected[0].shape == (batch, nodes, num)
        for got in (session.run(None, {"logits": logits}), evaluator.run(None, {"logits": logits})):
            np.testing.assert_array_equal(got[0], expected[0])
            np.testing.assert_allclose(got[1], expected[1], atol=TOLERANCE)
            assert [(a.dtype, a.shape) for a in got] == [(a.dtype, a.shape) for a in expected]


def test_ties_go_to_the_lower_index():
    logits = np.array([[[1.0, 3.0, 3.0, 0.0, 3.0]]], np.float32)
    candidates, probs = top_tokens(logits, num_candidates=4)
    assert candidates.tolist() == [[[1, 2, 4, 0]]]
    np.testing.assert_allclose(probs.sum(), 1 - np.exp(-3) / (3 + np.exp(-2) + np.exp(-3)), atol=1e-6)


@pytest.mark.parametrize("temperatures", [[0.0, 0.0, 0.0], [0.7, 1.0, 1.3], [0.0, 1.0, 0.4]])
def test_dists_of_the_body_equal_the_twins(temperatures):
    model = model_of("NodeProbs")
    session, evaluator = session_of(model), ReferenceEvaluator(model)
    feeds = {
        "logits": logits_of(np.random.default_rng(3), 3, 4, 97),
        "temperature": np.array(temperatures, np.float32),
        "top_k": np.array([0, 3, 0]),
        "top_p": np.array([1, 1, 0.9], np.float32),
    }
    (expected,) = node_probs(**feeds)
    assert expected.shape == (3, 4, 97 if any(temperatures) else 1)
    for (got,) in (session.run(None, feeds), evaluator.run(None, feeds)):
        np.testing.assert_allclose(got, expected, atol=TOLERANCE)
        assert got.dtype == expected.dtype
