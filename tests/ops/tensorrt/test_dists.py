# SPDX-License-Identifier: Apache-2.0


import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.core.sampling import warp
from speccompile.ops.candidates import node_probs, top_tokens
from speccompile.ops.sample_token import sample_token
from speccompile.ops.tensorrt.dists import TRT_WARP, block_sizes
from tests.lab.graphs import open_session
from tests.ops.op_lab import check_drawn, draw_case, mutated
from tests.ops.tensorrt.lab import Parsed, body_model, random_feeds

pytestmark = pytest.mark.plan

VOCABS = [1, 2, 63, 64, 65, 257, 4096, 4097, 9000]
EDGE = 1e-6  # a draw, or a top_p, this close to a running sum may fall on either side of it
PLAIN_EDGE = 1e-9  # per token, where ONNX Runtime sums a whole row in a few lanes


def _warped(session, feeds):  # type: ignore[no-untyped-def]
    return session.run(None, feeds)[0]


def _check_warp(session, feeds) -> int:  # type: ignore[no-untyped-def]
    """Each row is the twin's, or the twin's for a top_p within EDGE; returns the number of the latter."""
    got, expected = _warped(session, feeds), warp(**feeds)
    edge = EDGE + PLAIN_EDGE * expected.shape[-1]
    shifted = [warp(**{**feeds, "top_p": np.where(feeds["top_p"] < 1, feeds["top_p"] + e, 1)}) for e in (-edge, edge)]
    differing = ((got > 0) != (expected > 0)).any(axis=-1)
    for row in np.argwhere(differing):
        assert any(np.array_equal(got[tuple(row)] > 0, other[tuple(row)] > 0) for other in shifted), row
    np.testing.assert_allclose(got[~differing], expected[~differing], atol=2e-6, rtol=2e-5)
    return int(differing.sum())


@pytest.mark.parametrize("vocab", VOCABS)
def test_warp(vocab):
    session = open_session(body_model("Warp", {"vocab": vocab}))
    assert sum(_check_warp(session, random_feeds(vocab, 24, seed)) for seed in range(3)) <= 2


@pytest.fixture(scope="module")
def small_warp():  # type: ignore[no-untyped-def]
    return open_session(body_model("Warp", {"vocab": 12}))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=12, max_size=12),
    st.sampled_from([1.0, 0.125, 1 / 3, 0.01, 7.0]),
    st.floats(0.0625, 50, width=32),
    st.integers(0, 14),
    st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.7, 0.9, 0.999, 1.0]),
)
def test_top_k_keeps_what_the_twin_keeps(small_warp, logits, unit, heat, top_k, top_p):  # type: ignore[no-untyped-def]
    feeds = {
        "logits": (np.array(logits, np.float32) * np.float32(unit)).reshape(1, 1, 12),
        "temperature": np.array([heat], np.float32),
        "top_k": np.array([top_k]),
        "top_p": np.array([top_p], np.float32),
    }
    _check_warp(small_warp, feeds)


def test_neighbouring_floats_are_told_apart(small_warp):  # type: ignore[no-untyped-def]
    """The k-th logit and the next one differ by one unit in the last place, around every power of two."""
    for scale in (0.03, 0.5, 1.0, 2.0, 33.0, 127.0, 1e3, 1e5):
        top = np.float32(scale)
        logits = [top]
        for _ in range(11):
            logits.append(np.nextafter(logits[-1], np.float32(-np.inf)))
        for k in range(1, 13):
            feeds = {
                "logits": np.array(logits[::-1], np.float32).reshape(1, 1, 12),
                "temperature": np.ones(1, np.float32),
                "top_k": np.array([k]),
                "top_p": np.ones(1, np.float32),
            }
            assert (_warped(small_warp, feeds) > 0).sum() == k, (scale, k)


def test_ties_are_kept_as_the_twin_keeps_them():
    session = open_session(body_model("Warp", {"vocab": 360}))
    logits = np.array([[[1, 2, 2, 0, 2, 1] * 60]], np.float32)  # 180 ties at the top, then 120 more
    for top_k, top_p in ((1, 1.0), (181, 1.0), (0, 0.5), (1, 0.3), (190, 0.97)):
        feeds = {"logits": logits, "temperature": np.ones(1, np.float32), "top_k": np.array([top_k])}
        feeds["top_p"] = np.array([top_p], np.float32)
        np.testing.assert_allclose(_warped(session, feeds), warp(**feeds), atol=1e-7)


def test_tokens_that_are_masked_out_get_nothing():
    session = open_session(body_model("Warp", {"vocab": 64}))
    feeds = {**random_feeds(64, 8, 1), "temperature": np.ones(8, np.float32)}
    feeds["logits"][:, :, 5:40] = -np.inf
    assert _check_warp(session, feeds) == 0


@pytest.mark.parametrize("vocab", [*VOCABS, 300000])
def test_draw(vocab):
    session = open_session(body_model("Draw", {"vocab": vocab}))
    probs, uniforms = draw_case(vocab)
    share = check_drawn(session.run(None, {"probs": probs, "uniforms": uniforms})[0], probs, uniforms, EDGE)
    assert vocab > 9000 or share > 0.9


def test_blocks_follow_each_other_by_64_at_most():
    assert [block_sizes(v) for v in (1, 64, 65, 4096, 4097)] == [(1,), (64,), (2, 64), (64, 64), (2, 64, 64)]
    assert block_sizes(262144) == (64, 64, 64)


@pytest.mark.parametrize("vocab", [1, 7, 97, 4097])
def test_sample_token(vocab):
    session = open_session(body_model("SampleToken", {"vocab": vocab}))
    feeds = random_feeds(vocab, 16, vocab)
    feeds = {**feeds, "logits": feeds["logits"][:, :1], "uniforms": np.random.default_rng(0).random(16, np.float32)}
    ordered = {n: feeds[n] for n in ("logits", "uniforms", "temperature", "top_k", "top_p")}
    token, confidence, probs = session.run(None, ordered)
    expected = sample_token(**ordered)
    np.testing.assert_array_equal(token, expected[0])
    np.testing.assert_allclose(confidence, expected[1], atol=1e-6)
    np.testing.assert_allclose(probs, expected[2], atol=2e-6)


def test_half_logits_are_read_as_they_are():
    session = open_session(body_model("SampleToken", {"vocab": 97}, dtypes={"logits": "float16"}))
    feeds = random_feeds(97, 8, 3)
    logits = feeds.pop("logits")[:, :1].astype(np.float16)
    draws = np.random.default_rng(1).random(8, np.float32)
    token, confidence, _ = session.run(None, {"logits": logits, "uniforms": draws, **feeds})
    expected = sample_token(logits.astype(np.float32), draws, **feeds)
    np.testing.assert_array_equal(token, expected[0])
    np.testing.assert_allclose(confidence, expected[1], atol=1e-6)


def test_a_coarser_search_is_noticed():
    """With the last two rounds left out, logits that lie close to each other are kept together."""
    model = body_model("Warp", {"vocab": 12})
    lazy = open_session(mutated(model, TRT_WARP, "Squeeze(low_k_9,", "Squeeze(low_k_7,", 12))
    with pytest.raises(AssertionError):
        test_neighbouring_floats_are_told_apart(lazy)


ROWS = ((1,), (2,), (4,))


def nodes_of(vocab: int) -> tuple[tuple[int, ...], ...]:
    return (1, 1, vocab), (2, 4, vocab), (4, 8, vocab)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_candidates_equal_the_twins(dtype):
    session = open_session(body_model("TopTokens", {"vocab": 97, "candidates": 8}, dtypes={"logits": dtype}))
    logits = random_feeds(97, 4, 1)["logits"].astype(dtype)
    expected = top_tokens(logits.astype(np.float32))
    got = session.run(None, {"logits": logits})
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_allclose(got[1], expected[1], atol=1e-6)


def test_dists_are_never_a_dummy():
    session = open_session(body_model("NodeProbs", {"vocab": 97}))
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
