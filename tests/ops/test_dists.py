# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.core.sampling import warp
from tests.ops.op_lab import check_drawn, draw_case, model_of, session_of

# Rows without top-p have no nucleus: 0/0 is computed there and not used.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide")

VOCABS = [1, 2, 63, 64, 65, 257, 1000, 8192]


def _runners(name: str):  # type: ignore[no-untyped-def]
    model = model_of(name)
    session, evaluator = session_of(model), ReferenceEvaluator(model)
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
