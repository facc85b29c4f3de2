# SPDX-License-Identifier: Apache-2.0


import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.core.sampling import warp
from speccompile.ops.candidates import node_probs, top_tokens
from speccompile.ops.sample_token import sample_token
from tests.lab.graphs import open_session
from tests.ops.op_lab import check_drawn, draw_case, model_of

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide")

# Rows without top-p have no nucleus: 0/0 is computed there and not used.

VOCABS = [1, 2, 63, 64, 65, 257, 1000, 8192]


def _runners(name: str):  # type: ignore[no-untyped-def]
    model = model_of(name)
    session, evaluator = open_session(model), ReferenceEvaluator(model)
    return [lambda feeds: session.run(None, feeds)[0], lambda feeds: evaluator.run(None, feeds)[0]]


@pytest.mark.parametrize("vocab", VOCABS)
def test_first_max(vocab):
    rng = np.random.default_rng(vocab)
    logits = np.round(rng.normal(size=(3, 4, vocab)) * 2).astype(np.float32)  # many ties
    logits[0, 0], logits[0, 1, :-1] = -np.inf, -np.inf
    logits[0, 0, vocab // 2] = -1e30
    for run in _runners("FirstMax"):
        np.testing.assert_array_equal(run({"logits": logits}), logits.argmax(-1))


@pytest.mark.parametrize("vocab", VOCABS)
def test_draw(vocab):
    probs, uniforms = draw_case(vocab)
    for run in _runners("Draw"):
        assert check_drawn(run({"probs": probs, "uniforms": uniforms}), probs, uniforms, 1e-6) > 0.9


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("spread", [0.05, 3.0])  # flat rows need more than what is sorted at first
def test_warp(vocab, spread):
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(9, 2, vocab)) * spread).astype(np.float32)
    temperature = np.array([1, 0.5, 2, 1, 1, 1, 0, 0, 1], np.float32)
    top_k = np.array([0, 0, 0, 3, 5, 0, 2, 0, vocab + 9])
    top_p = np.array([1, 1, 1, 1, 0.5, 0.95, 0.5, 1, 0.999], np.float32)
    expected = warp(logits, temperature, top_k, top_p)
    slots = [range(9), [0, 1, 2], [3], [5], [6, 7], [0, 6]]
    for run in _runners("Warp"):
        for chosen in slots:
            some = list(chosen)
            feeds = {"logits": logits[some], "temperature": temperature[some], "top_k": top_k[some]}
            got = run({**feeds, "top_p": top_p[some]})
            # float32 sums shift the edge of the nucleus by up to 1e-6: at most one token more or less a row.
            wrong = (got > 0) != (expected[some] > 0)
            assert wrong.sum() <= len(some) * 2 // 8
            rows = ~wrong.any(axis=-1)
            np.testing.assert_allclose(got[rows], expected[some][rows], atol=2e-6, rtol=2e-5)


def test_warp_keeps_ties_as_the_twin_does():
    logits = np.array([[[1, 2, 2, 0, 2, 1] * 60]], np.float32)  # 180 ties at the top, then 120 more
    for run in _runners("Warp"):
        for top_k, top_p in ((1, 1.0), (181, 1.0), (0, 0.5), (1, 0.3), (190, 0.97)):
            arguments = (np.array([1.0], np.float32), np.array([top_k]), np.array([top_p], np.float32))
            got = run(dict(zip(("logits", "temperature", "top_k", "top_p"), (logits, *arguments), strict=True)))
            np.testing.assert_allclose(got, warp(logits, *arguments), atol=1e-7)


def test_the_nucleus_does_not_depend_on_the_batch():
    """A slot whose first 64 tokens are enough keeps the same set beside a slot that needs a thousand."""
    rng = np.random.default_rng(8)
    logits = np.concatenate((rng.normal(size=(6, 1, 3000)) * 4, rng.normal(size=(2, 1, 3000)) * 0.2)).astype(np.float32)
    ones, off = np.ones(8, np.float32), np.zeros(8, np.int64)
    top_p = np.array([0.9, 0.5, 0.99, 1.0, 0.999999, 0.2, 0.9, 1.0], np.float32)
    for run in _runners("Warp"):
        feeds = {"logits": logits, "temperature": ones, "top_k": off, "top_p": top_p}
        together = run(feeds)
        assert (together[6] > 0).sum() > 1000
        for slot in range(8):
            np.testing.assert_array_equal(run({n: a[slot : slot + 1] for n, a in feeds.items()})[0], together[slot])


# Rows without top-p have no nucleus: 0/0 is computed there and not used.

TOLERANCE = 1e-6  # of a probability: float32 softmax against float64


@pytest.mark.parametrize("vocab", [1, 7, 64, 97, 1000])
@pytest.mark.parametrize("temperatures", [[0.0] * 4, [0.7, 1.0, 1.3, 0.5], [0.0, 1.0, 0.0, 2.0]])
def test_body_equals_twin(vocab, temperatures):
    model = model_of("SampleToken")
    session, evaluator = open_session(model), ReferenceEvaluator(model)
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


# Rows without top-p have no nucleus: 0/0 is computed there and not used.


def logits_of(rng: np.random.Generator, batch: int, nodes: int, vocab: int) -> np.ndarray:
    """With ties in some slots."""
    logits = rng.normal(size=(batch, nodes, vocab)) * 2
    logits[::2] = np.round(logits[::2])
    return logits.astype(np.float32)


@pytest.mark.parametrize(("vocab", "num"), [(1, 1), (7, 7), (64, 3), (1000, 64)])
def test_candidates_of_the_body_equal_the_twins(vocab, num):
    model = model_of("TopTokens", num_candidates=num)
    session, evaluator = open_session(model), ReferenceEvaluator(model)
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
    session, evaluator = open_session(model), ReferenceEvaluator(model)
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
