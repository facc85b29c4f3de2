# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.ops.sample_token import sample_token
from tests.ops.op_lab import model_of, session_of

# Rows without top-p have no nucleus: 0/0 is computed there and not used.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide")

TOLERANCE = 1e-6  # of a probability: float32 softmax against float64


@pytest.mark.parametrize("vocab", [1, 7, 64, 97, 1000])
@pytest.mark.parametrize("temperatures", [[0.0] * 4, [0.7, 1.0, 1.3, 0.5], [0.0, 1.0, 0.0, 2.0]])
def test_body_equals_twin(vocab, temperatures):
    model = model_of("SampleToken")
    session, evaluator = session_of(model), ReferenceEvaluator(model)
    rng = np.random.default_rng(vocab)
    for _ in range(5):
        feeds = {
            "logits": (rng.normal(size=(4, 1, vocab)) * 2).astype(np.float32),
            "uniforms": rng.random(4).astype(np.float32),
            "temperature": np.array(temperatures, np.float32),
            "top_k": np.array([0, 3, 0, 2]),
            "top_p": np.array([1, 1, 0.9, 0.7], np.float32),
        }
        expected = sample_token(**feeds)
        for got in (session.run(None, feeds), evaluator.run(None, feeds)):
            np.testing.assert_array_equal(got[0], expected[0])
            np.testing.assert_allclose(got[1], expected[1], atol=TOLERANCE)
            np.testing.assert_allclose(got[2], expected[2], atol=TOLERANCE)
            assert [(a.dtype, a.shape) for a in got] == [(a.dtype, a.shape) for a in expected]


def test_greedy_needs_no_dist():
    logits = np.log(np.array([[[0.2, 0.5, 0.3]]], np.float32))
    token, confidence, probs = sample_token(
        logits, *(np.array([x], np.float32) for x in (0.9, 0)), np.array([0]), np.ones(1)
    )
    assert token.tolist() == [1] and probs.tolist() == [[0.0]]
    np.testing.assert_allclose(confidence, [0.5], atol=TOLERANCE)


def test_confidence_is_at_temperature_1():
    logits = np.log(np.array([[[0.2, 0.5, 0.3]]], np.float32))
    token, confidence, probs = sample_token(
        logits, np.array([0.99], np.float32), np.array([9.0], np.float32), np.array([2]), np.ones(1, np.float32)
    )
    assert token.tolist() == [2]
    np.testing.assert_allclose(confidence, [0.3], atol=TOLERANCE)
    assert probs[0, 0] == 0 and abs(probs[0, 2] - 0.5) < 0.05
