# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.core.sampling import (
    ACCEPT_LANE,
    DRAFT_LANE,
    TARGET_LANE,
    SamplingParams,
    draw,
    philox,
    race_draws,
    tree_uniforms,
    uniforms,
    warp,
    warp_inputs,
)
from speccompile.core.tree import TokenTree
from speccompile.errors import RuntimeFault


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known-answer vectors of Random123, philox4x32 with 10 rounds.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert tuple(int(w) for w in philox(np.array(counter, np.uint64), np.array(key, np.uint64))) == expected


def test_philox_is_elementwise():
    rng = np.random.default_rng(0)
    counters, keys = rng.integers(0, 2**32, (4, 3, 5), np.uint64), rng.integers(0, 2**32, (2, 3, 5), np.uint64)
    blocks = philox(counters, keys)
    assert blocks.shape == (4, 3, 5) and int(blocks.max()) < 2**32
    np.testing.assert_array_equal(blocks[:, 1, 2], philox(counters[:, 1, 2], keys[:, 1, 2]))


def test_uniforms_are_uniform_and_independent():
    from scipy import stats

    positions = np.arange(20000)[None]
    by_lane = [uniforms([7], positions, lane)[0] for lane in (ACCEPT_LANE, TARGET_LANE, DRAFT_LANE)]
    other_seeds = [uniforms([seed], positions, TARGET_LANE)[0] for seed in (8, 7 + 2**32, 2**64 - 1)]
    rows = np.array(by_lane + other_seeds)
    assert rows.dtype == np.float32 and rows.min() >= 0 and rows.max() < 1
    for row in rows:
        assert stats.kstest(row, "uniform").pvalue > 1e-3
        cells = np.histogram2d(row[:-1], row[1:], bins=16, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(cells.ravel()).pvalue > 1e-3
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 4 / np.sqrt(rows.shape[1])


def test_uniforms_do_not_depend_on_the_batch():
    seeds, positions = np.array([3, 2**63 + 1], np.uint64), np.array([[5, 6, 2**40], [5, 9, 1]])
    both = uniforms(seeds, positions, TARGET_LANE)
    for slot in range(2):
        np.testing.assert_array_equal(
            both[slot], uniforms(seeds[slot : slot + 1], positions[slot : slot + 1], TARGET_LANE)[0]
        )
    assert len(np.unique(both)) == both.size


def test_deterministic_drafts_have_the_draws_of_a_race():
    tree = TokenTree.tree([[0] * 4], [[-1, 0, 0, 1]])
    np.testing.assert_array_equal(tree_uniforms([11], [40], tree), race_draws([11], [[41, 42, 42, 43]]))


def test_tree_uniforms_belong_to_the_token_they_decide():
    tree = TokenTree.tree([[0] * 5], [[-1, 0, 0, 1, 2]], draft_probs=np.zeros((1, 5, 2), np.float32))
    drawn = tree_uniforms([11], [40], tree)[0]
    assert drawn.shape == (5, 2) and drawn.flags.c_contiguous
    for node, depth in enumerate((0, 1, 1, 2, 2)):
        assert drawn[node, 0] == uniforms([11], [[40 + depth]], ACCEPT_LANE + depth)[0, 0]
        assert drawn[node, 1] == uniforms([11], [[41 + depth]], TARGET_LANE)[0, 0]


@pytest.mark.export
def test_warp_is_what_transformers_does():
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(64, 50)) * 3).astype(np.float32)
    logits[:8] = np.round(logits[:8])  # ties at the top-k threshold
    for temperature, top_k, top_p in ((0.7, 0, 1.0), (1.0, 5, 1.0), (1.4, 0, 0.8), (0.9, 12, 0.6), (1.0, 80, 0.01)):
        rows = slice(None) if top_p == 1.0 else slice(8, None)  # it sorts unstably: tied tokens at top_p are its own
        scores = process.TemperatureLogitsWarper(temperature)(None, torch.from_numpy(logits[rows].copy()))
        if top_k:
            scores = process.TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1:
            scores = process.TopPLogitsWarper(top_p)(None, scores)
        full = np.ones(len(scores))
        got = warp(logits[rows], temperature * full, (top_k * full).astype(np.int64), top_p * full)
        np.testing.assert_allclose(got, scores.softmax(-1).numpy(), atol=1e-6)


def test_warp_by_slot():
    logits = np.log(np.array([[[0.4, 0.3, 0.2, 0.1]]] * 5, dtype=np.float32))
    got = warp(logits, [0.0, 1.0, 1.0, 1.0, 0.0], [0, 0, 2, 0, 3], [1.0, 1.0, 1.0, 0.65, 0.1])
    expected = [[1, 0, 0, 0], [0.4, 0.3, 0.2, 0.1], [4 / 7, 3 / 7, 0, 0], [4 / 7, 3 / 7, 0, 0], [1, 0, 0, 0]]
    np.testing.assert_allclose(got[:, 0], expected, atol=1e-6)
    assert got.dtype == np.float32


def test_ties():
    logits = np.array([[2, 3, 3, 1, 3]], dtype=np.float32)
    np.testing.assert_array_equal(warp(logits, [0.0], [0], [1.0]), [[0, 1, 0, 0, 0]])
    np.testing.assert_allclose(warp(logits, [1.0], [1], [1.0]), [[0, 1 / 3, 1 / 3, 0, 1 / 3]], atol=1e-7)
    np.testing.assert_allclose(warp(logits, [1.0], [0], [0.5]), [[0, 0.5, 0.5, 0, 0]], atol=1e-7)


def test_top_p_is_reached_by_a_mass_equal_to_it():
    quarters = np.zeros((1, 4), dtype=np.float32)  # their sums are exact
    for top_p, num in ((1e-46, 1), (0.25, 1), (0.5, 2), (0.75, 3), (0.51, 3)):
        np.testing.assert_array_equal(warp(quarters, [1.0], [0], [top_p])[0] > 0, np.arange(4) < num)


def test_a_draw_at_an_edge_takes_the_next_token_with_mass():
    probs = np.array([0, 0.5, 0, 0.5, 0], dtype=np.float32)
    at = [0, 0.5 - 2**-24, 0.5, 1 - 2**-24]
    assert draw(np.tile(probs, (4, 1)), at).tolist() == [1, 1, 3, 3]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(5, 500), st.integers(0, 40), st.integers(1, 100), st.integers(1, 30))
def test_warp_keeps_the_most_probable(seed, heat, top_k, mass, vocab):
    temperature, top_p = heat / 100, mass / 100
    logits = np.random.default_rng(seed).normal(size=(1, vocab)).astype(np.float32)
    probs = warp(logits, [temperature], [top_k], [top_p])[0]
    assert abs(probs.sum(dtype=np.float64) - 1) < 1e-5
    kept = probs > 0
    assert kept[logits[0].argmax()]
    if (~kept).any() and temperature > 0.2:  # below, the softmax itself runs out of float32
        assert logits[0][kept].min() >= logits[0][~kept].max()
    if top_k:
        assert kept.sum() <= top_k  # these logits have no ties


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**24 - 1), st.integers(1, 30))
def test_draw_inverts_the_cdf(seed, word, vocab):
    uniform = word * 2**-24
    rng = np.random.default_rng(seed)
    probs = (rng.random(vocab) * (rng.random(vocab) < 0.6)).astype(np.float32)
    probs[rng.integers(vocab)] += np.float32(0.5)
    token = int(draw(probs, uniform))
    mass = np.cumsum(probs, dtype=np.float64)
    assert probs[token] > 0
    assert mass[token] > uniform * mass[-1] and (token == 0 or mass[token - 1] <= uniform * mass[-1])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_new_tokens", 0, "got 0; expected at least 1"),
        ("temperature", -0.5, "got -0.5; expected 0"),
        ("temperature", float("nan"), "got nan; expected 0"),
        ("temperature", float("inf"), "got inf; expected 0"),
        ("top_k", -1, "got -1; expected 0"),
        ("top_p", 0.0, "got 0.0; expected above 0"),
        ("top_p", 1.5, "got 1.5; expected above 0"),
        ("seed", -1, "got -1; expected 0 to"),
        ("seed", 2**64, "expected 0 to"),
        ("stop", "", "expected at most 64 non-empty strings"),
        ("stop", ("",), "expected at most 64 non-empty strings"),
        ("stop", (3,), r"got \(3,\); expected a non-empty string, or a tuple of them"),
        ("top_k", 2**31, r"expected 0 \(off\) or above, at most"),
        ("top_k", 2**63, "got 9223372036854775808; expected 0"),
        ("top_k", 1.5, "got 1.5; expected an integer"),
        ("top_k", 10**300, r"got 10*\.\.\.; expected 0"),
        ("temperature", "hot", "got 'hot'; expected a number"),
        ("temperature", None, "got None; expected a number"),
        ("seed", [1], r"got \[1\]; expected an integer"),
        ("stop_token_ids", 5, "got 5; expected a tuple of token ids"),
        ("ignore_eos", "no", "got 'no'; expected true or false"),
        ("logit_bias", {float("inf"): 1.0}, "expected .token id, bias. pairs"),
    ],
)
def test_requests_out_of_range_are_refused(field, value, message):
    with pytest.raises(RuntimeFault, match=f"SamplingParams.{field}: .*{message}"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_warp_inputs():
    arrays = warp_inputs([SamplingParams(), SamplingParams(temperature=0.5, top_k=3, top_p=0.25)])
    assert [a.tolist() for a in arrays] == [[0.0, 0.5], [0, 3], [1.0, 0.25]]
    assert [a.dtype for a in arrays] == [np.float32, np.int64, np.float32]
    assert SamplingParams().is_greedy and not SamplingParams(temperature=0.5).is_greedy


@pytest.mark.parametrize("temperature", [1e-46, 1e-40, 1e-38, 1e-37, 3e-37, 1e-36, 1e-25])
@pytest.mark.parametrize("top", [(0, 1.0), (3, 1.0), (0, 0.3)])
def test_the_lowest_temperatures_are_greedy_however_large_the_logits(temperature, top):
    logits = np.array([[300.0, 324.0, 323.9, 324.0], [-2e18, -3e18, -2e18, -5.0]], dtype=np.float32)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        probs = warp(logits, [temperature] * 2, [top[0]] * 2, [top[1]] * 2)
    assert probs.tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]
    assert SamplingParams(temperature=temperature).is_greedy


def test_values_that_float32_does_not_hold_are_brought_into_its_range():
    temperature, _, top_p = warp_inputs([SamplingParams(temperature=1e300, top_p=1e-300)])
    assert np.isfinite(temperature).all() and top_p[0] > 0
    probs = warp(np.array([[1.0, 5.0, 2.0]], dtype=np.float32), [1.0], [0], top_p)
    assert probs.tolist() == [[0, 1, 0]]


def test_a_number_that_python_does_not_write_is_refused_in_words():
    with pytest.raises(RuntimeFault, match="got a number of thousands of digits; expected 0"):
        SamplingParams(seed=10**5000)
