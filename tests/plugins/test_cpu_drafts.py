# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels of a draft's tail give the tokens and distributions of the numpy twins."""

import itertools

import numpy as np
import onnxruntime as ort
import pytest

from speccompile.backends.onnxruntime.engine import FAULTS
from speccompile.core.sampling import warp
from speccompile.ops.candidates import node_probs, top_tokens
from speccompile.ops.sample_token import sample_token
from tests.lab.graphs import open_session
from tests.ops.op_lab import Case, model_of, same
from tests.plugins.cpu_lab import library, library_for, needs_compiler
from tests.plugins.verify_cases import LAST_DRAW, distort

pytestmark = [needs_compiler, pytest.mark.plan]

TOLERANCE = 1e-6  # of a probability: float32 softmax against float64
WARPS = list(itertools.product((0, 0.05, 1, 3), (0, 1, 5), (0.1, 0.9, 1)))
KINDS = ("normal", "flat", "ties", "equal", "one token", "masks")


def open_op(name: str, threads: int = 1, **attributes: int) -> ort.InferenceSession:
    return open_session(model_of(name, **attributes), library(), threads)


def logits_of(rng: np.random.Generator, batch: int, nodes: int, vocab: int, kind: str) -> np.ndarray:
    logits = (rng.normal(size=(batch, nodes, vocab)) * (0.05 if kind == "flat" else 3)).astype(np.float32)
    distort(rng, logits, kind)
    return logits


def warp_columns(warps: list[tuple[float, int, float]]) -> Case:
    heat, top_k, top_p = zip(*warps, strict=True)
    return {
        "temperature": np.array(heat, np.float32),
        "top_k": np.array(top_k, np.int64),
        "top_p": np.array(top_p, np.float32),
    }


def assert_dists(got: np.ndarray, wanted: np.ndarray) -> None:
    """Float32 sums may shift the edge of a nucleus by one token; other rows are equal up to rounding."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    wrong = ((got > 0) != (wanted > 0)) & (np.maximum(got, wanted) > 1e-30)
    assert wrong.sum() <= wrong.shape[0] // 16, np.argwhere(wrong)
    rows = ~wrong.any(axis=-1)
    np.testing.assert_allclose(got[rows], wanted[rows], atol=TOLERANCE, rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 16, 97, 1000, 8192])
@pytest.mark.parametrize("variant", ["native", "avx2", "portable"])
def test_distributions_of_nodes(vocab, kind, variant):
    rng = np.random.default_rng(vocab)
    feeds = {"logits": logits_of(rng, len(WARPS), 2, vocab, kind), **warp_columns(WARPS)}
    session = open_session(model_of("NodeProbs"), library_for(variant))
    [got] = session.run(None, feeds)
    [wanted] = node_probs(**feeds)
    assert_dists(got, wanted)
    assert not got[np.isneginf(feeds["logits"])].any()
    for slot in range(0, len(WARPS), 5):
        if WARPS[slot][0] > 0:
            [alone] = session.run(None, {n: a[slot : slot + 1] for n, a in feeds.items()})
            np.testing.assert_array_equal(alone[0], got[slot])


@pytest.mark.parametrize("top_p", [1e-30, 0.5, 0.95, 0.999999])
@pytest.mark.parametrize("top_k", [0, 3, 700, 9000])
def test_the_nucleus_of_large_vocabularies(top_p, top_k):
    """Peaked and flat rows, in one thread and in two: equal bits."""
    rng = np.random.default_rng(1)
    logits = np.concatenate([logits_of(rng, 1, 1, 50257, kind) for kind in ("normal", "flat", "ties")])
    feeds = {"logits": logits, **warp_columns([(0.8, top_k, top_p)] * 3)}
    results = [open_op("NodeProbs", threads).run(None, feeds)[0] for threads in (1, 2)]
    np.testing.assert_array_equal(*results)
    [wanted] = node_probs(**feeds)
    is_wrong = (results[0] > 0) != (wanted > 0)
    assert (np.maximum(results[0], wanted) * is_wrong).sum(axis=-1).max() < TOLERANCE
    for got, row in zip(results[0][:, 0], wanted[:, 0], strict=True):
        np.testing.assert_allclose(got, row, atol=2 * TOLERANCE)
    one = {n: a[:1] for n, a in feeds.items()}
    np.testing.assert_array_equal(open_op("NodeProbs", 2).run(None, one)[0], results[0][:1])


def test_ties_at_the_edges_are_kept_as_by_the_twin():
    logits = np.array([[[1, 2, 2, 0, 2, 1] * 60]], np.float32)  # 180 ties at the top, then 120 more
    session = open_op("NodeProbs")
    for top_k, top_p in ((1, 1.0), (181, 1.0), (0, 0.5), (1, 0.3), (190, 0.97), (0, 0.9999999)):
        feeds = {"logits": logits, **warp_columns([(1.0, top_k, top_p)])}
        wanted = warp(logits, 1.0, top_k, np.float32(top_p))
        np.testing.assert_allclose(session.run(None, feeds)[0], wanted, atol=1e-7)
    equal = {"logits": np.zeros((1, 1, 1000), np.float32), **warp_columns([(1.0, 0, 0.5)])}
    assert np.flatnonzero(session.run(None, equal)[0]).tolist() == list(range(500))


def test_cuts_out_of_range_keep_the_greatest_token_or_all():
    logits = np.random.default_rng(0).normal(size=(1, 1, 1000)).astype(np.float32)
    session = open_op("NodeProbs")
    for top_k, top_p, kept in (
        (0, 0.0, 1),
        (0, -1e30, 1),
        (0, np.nan, 1000),
        (0, 2.0, 1000),
        (-(1 << 63), 1.0, 1000),
        ((1 << 63) - 1, 1.0, 1000),
        (3, 0.0, 1),
    ):
        [got] = session.run(None, {"logits": logits, **warp_columns([(1.0, top_k, top_p)])})
        assert (got > 0).sum() == kept and abs(got.sum() - 1) < 1e-5 and got.argmax() == logits.argmax()


def test_greedy_batches_need_no_distributions():
    columns = warp_columns([(0.0, 0, 1.0)] * 3)
    logits = np.zeros((3, 4, 97), np.float32)
    [got] = open_op("NodeProbs").run(None, {"logits": logits, **columns})
    assert got.shape == (3, 4, 1) and not got.any()
    feeds = {"logits": logits[:, :1], "uniforms": np.zeros(3, np.float32), **columns}
    token, confidence, probs = open_op("SampleToken").run(None, feeds)
    assert token.tolist() == [0, 0, 0] and probs.shape == (3, 1) and not probs.any()
    np.testing.assert_allclose(confidence, 1 / 97, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 7, 64, 97, 1000])
@pytest.mark.parametrize("warps", [WARPS, WARPS[:9]], ids=["mixed", "greedy"])
def test_sampled_tokens(vocab, kind, warps):
    rng = np.random.default_rng(vocab)
    feeds = {
        "logits": logits_of(rng, len(warps), 1, vocab, kind),
        "uniforms": rng.random(len(warps)).astype(np.float32),
        **warp_columns(warps),
    }
    feeds["uniforms"][::3], feeds["uniforms"][1::5] = 0, LAST_DRAW
    session = open_op("SampleToken")
    token, confidence, probs = session.run(None, feeds)
    wanted, _, dists = sample_token(**feeds)
    assert (token.dtype, confidence.dtype) == (np.int64, np.float32)
    assert_dists(probs, dists)
    near = [
        sample_token(**{**feeds, "uniforms": np.clip(feeds["uniforms"] + e, 0, LAST_DRAW).astype(np.float32)})[0]
        for e in (-1e-6, 1e-6)
    ]
    at_end = feeds["uniforms"] == LAST_DRAW  # the next draw would be 1: any token with mass after the twin's
    assert ((token >= near[0]) & ((token <= near[1]) | at_end)).all()
    assert (token == wanted).mean() > 0.7
    if probs.shape[-1] > 1:
        assert (np.take_along_axis(probs, token[:, None], axis=-1) > 0).all()
    exact = node_probs(feeds["logits"], np.ones(len(warps)), np.zeros(len(warps), np.int64), np.ones(len(warps)))[0]
    np.testing.assert_allclose(
        confidence, np.take_along_axis(exact[:, 0], token[:, None], axis=1)[:, 0], atol=TOLERANCE
    )
    for slot in range(0, len(warps), 7):
        alone = session.run(None, {n: a[slot : slot + 1] for n, a in feeds.items()})
        assert same(alone[:2], [token[slot : slot + 1], confidence[slot : slot + 1]])


def test_draws_follow_the_distribution():
    """A grid of draws gives every token its share, to the width of the grid."""
    rng, num = np.random.default_rng(0), 4096
    for warps in ((1.0, 0, 1.0), (0.7, 5, 1.0), (1.5, 0, 0.8), (3.0, 20, 0.9)):
        row = rng.normal(size=37).astype(np.float32)
        feeds = {
            "logits": np.tile(row, (num, 1, 1)),
            "uniforms": (np.arange(num, dtype=np.float32) + np.float32(0.5)) / np.float32(num),
            **warp_columns([warps] * num),
        }
        shares = np.bincount(open_op("SampleToken").run(None, feeds)[0], minlength=37) / num
        np.testing.assert_allclose(shares, warp(row[None], *warps)[0], atol=1.01 / num)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "num"), [(1, 1), (7, 7), (64, 3), (1000, 64), (1000, 1000), (50257, 8)])
def test_candidates(vocab, num, kind):
    logits = logits_of(np.random.default_rng(vocab), 2, 2, vocab, kind)
    session = open_op("TopTokens", num_candidates=num)
    candidates, probs = session.run(None, {"logits": logits})
    wanted, wanted_probs = top_tokens(logits, num_candidates=num)
    assert (candidates.dtype, probs.dtype) == (np.int64, np.float32)
    np.testing.assert_array_equal(candidates, wanted)
    np.testing.assert_allclose(probs, wanted_probs, atol=TOLERANCE)
    for part in (logits[1:], logits[:, :1]):
        alone = session.run(None, {"logits": part})
        whole = [candidates[1:], probs[1:]] if part.shape[0] == 1 else [candidates[:, :1], probs[:, :1]]
        assert same(alone, whole)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("fraction", [0.5, 0.995, 1.0])
def test_rows_that_are_not_finite_give_tokens_of_the_vocabulary(value, fraction):
    rng = np.random.default_rng(0)
    logits = np.where(rng.random((5, 1, 700)) < fraction, value, rng.normal(size=(5, 1, 700))).astype(np.float32)
    columns = warp_columns([(1.0, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.5), (1.0, 600, 0.5), (0.0, 0, 1.0)])
    candidates, _ = open_op("TopTokens", num_candidates=64).run(None, {"logits": logits})
    token, _, _ = open_op("SampleToken").run(
        None, {"logits": logits, "uniforms": np.full(5, 0.5, np.float32), **columns}
    )
    for tokens in (candidates, token):
        assert (tokens >= 0).all() and (tokens < 700).all()
    open_op("NodeProbs").run(None, {"logits": logits, **columns})


def test_more_candidates_than_tokens_are_refused():
    with pytest.raises(FAULTS, match="TopTokens: num_candidates 0, expected at least 1"):
        open_op("TopTokens", num_candidates=0)
    session = open_op("TopTokens", num_candidates=8)
    with pytest.raises(FAULTS, match="TopTokens: num_candidates 8, expected at most the 7 tokens"):
        session.run(None, {"logits": np.zeros((1, 1, 7), np.float32)})


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "uniforms", "logits"])
def test_tensors_of_other_dims_are_refused(name):
    feeds = {
        "logits": np.zeros((2, 1, 7), np.float32),
        "uniforms": np.zeros(2, np.float32),
        **warp_columns([(1.0, 0, 1.0)] * 2),
    }
    feeds[name] = np.zeros((2, 2, 7) if name == "logits" else 3, feeds[name].dtype)
    for op in ("SampleToken", "NodeProbs"):
        if op == "NodeProbs" and name in ("uniforms", "logits"):
            continue
        model = model_of(op)
        for value in model.graph.input:  # ONNX Runtime itself compares named dims
            value.type.tensor_type.ClearField("shape")
        names = {value.name for value in model.graph.input}
        with pytest.raises(FAULTS, match=f"{op}: {name} has dims"):
            open_session(model, library()).run(None, {n: a for n, a in feeds.items() if n in names})
