# SPDX-License-Identifier: Apache-2.0
"""SpecVerify's kernels, run on the CPU, make the same decisions as the numpy twin."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.spec_verify import spec_verify
from tests.ops.op_lab import same, verify_case, zero_residual_case
from tests.plugins import host_lab
from tests.plugins.cases import CHAIN, TREE, as_dtype, assert_same, in_dtype, wide_case

pytestmark = pytest.mark.plan

KINDS = list(itertools.product(("greedy", "sampled", "mixed"), (True, False), (True, False)))
VOCABS = (1, 2, 5, 97, 255, 256, 257, 1025)  # a chunk has 256 entries, a warp four chunks
DTYPES = ("float32", "float16", "bfloat16")
CUTS = [
    {},
    {"top_k": 1},
    {"top_k": 50},
    {"top_p": 0.9},
    {"top_k": 50, "top_p": 0.95},
    {"top_k": 3000},
    {"temperature": 0},
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_cases(dtype):
    kernels, rng = host_lab.kernels(), np.random.default_rng(DTYPES.index(dtype))
    num_accepted = num_at_boundary = 0
    for number in range(96):
        heat, is_chain, has_probs = KINDS[number % len(KINDS)]
        vocab = int(rng.choice(VOCABS[3:] if has_probs else VOCABS))
        case = in_dtype(verify_case(rng, vocab, is_chain=is_chain, has_probs=has_probs, heat=heat), dtype)

        def run(feeds, number=number):  # type: ignore[no-untyped-def]
            return host_lab.verify(kernels, as_dtype(feeds, dtype), seed=number)

        num_at_boundary += assert_same(run, case)
        num_accepted += int(spec_verify(**case)[1].sum())
    assert num_at_boundary <= 1
    assert num_accepted > 96


@pytest.mark.parametrize("warp", CUTS, ids=str)
@pytest.mark.parametrize("spread", [0.3, 3.0])  # flat and peaked
def test_a_large_vocabulary(spread, warp):
    kernels, rng = host_lab.kernels(), np.random.default_rng(3)
    num_at_boundary = 0
    for dtype, form in (("float16", CHAIN), ("float32", TREE[:4])):
        case = wide_case(rng, 152064, 2, form, spread=spread, dtype=dtype, **warp)
        num_at_boundary += assert_same(
            lambda feeds, dtype=dtype: host_lab.verify(kernels, as_dtype(feeds, dtype)),  # type: ignore[misc]
            case,
        )
    assert num_at_boundary == 0


@pytest.mark.parametrize(("batch", "vocab"), [(64, 97), (33, 513), (1, 128256), (3, 50257)])  # 50257: no vector loads
def test_batches(batch, vocab):
    rng = np.random.default_rng(batch)
    case = wide_case(rng, vocab, batch, TREE if batch > 3 else (-1, 0), spread=2.0, dtype="bfloat16", top_p=0.9)
    assert not assert_same(lambda feeds: host_lab.verify(host_lab.kernels(), as_dtype(feeds, "bfloat16")), case)
    if batch > 3:
        assert spec_verify(**case)[1].max() == 2  # whole paths are among them


@pytest.mark.parametrize("has_probs", [True, False])
def test_zero_residual_mass(has_probs):
    case = zero_residual_case(has_probs)
    outputs = host_lab.verify(host_lab.kernels(), case)
    assert [o.tolist() for o in outputs] == [[[0, -1, -1]], [0], [2]]


def test_no_drafts_and_a_parent_that_prefill_left_at_the_root():
    case = verify_case(np.random.default_rng(3), 97, is_chain=True, has_probs=False, heat="greedy")
    case = {n: a[:, :1] if a.ndim > 1 else a for n, a in case.items()}
    case["parents"] = np.full_like(case["parents"], 510)
    path, num_accepted, next_token = host_lab.verify(host_lab.kernels(), case)
    assert (path == 0).all() and (num_accepted == 0).all()
    np.testing.assert_array_equal(next_token, case["logits"][:, 0].argmax(-1))


@pytest.mark.parametrize("is_sorted", [True, False])
def test_draft_vocabulary_map(is_sorted):
    rng, accepted = np.random.default_rng(11), 0
    for number in range(24):
        case = verify_case(
            rng, 300, is_chain=number % 2 == 0, has_probs=True, heat=("sampled", "mixed")[number // 2 % 2]
        )
        d2t = rng.permutation(300)[:90]
        d2t = np.sort(d2t) if is_sorted else d2t
        dists = case["draft_probs"][..., d2t] + np.float32(1e-4)
        case["draft_probs"] = (dists / dists.sum(-1, keepdims=True)).astype(np.float32)
        drafts = d2t[rng.integers(0, 90, case["tokens"].shape)]
        case["tokens"] = np.where(rng.random(drafts.shape) < 0.5, drafts, case["tokens"])
        got = host_lab.verify(host_lab.kernels(), case, d2t=d2t, seed=number)
        expected = spec_verify(**case, d2t=d2t)
        assert same(got, expected), number
        accepted += int(expected[1].sum())
    assert accepted > 10


def test_the_twin_spreads_draft_dists_over_the_target_vocabulary():
    case = verify_case(np.random.default_rng(2), 64, is_chain=False, has_probs=True, heat="sampled")
    order = np.random.default_rng(3).permutation(64)
    narrow = {**case, "draft_probs": case["draft_probs"][..., order]}
    assert same(spec_verify(**narrow, d2t=order), spec_verify(**case))
    plain = {**case, "draft_probs": np.zeros((*case["tokens"].shape, 1), np.float32)}
    assert same(spec_verify(**plain, d2t=order), spec_verify(**plain))


def test_ties_are_broken_by_index():
    """All logits equal: top_p keeps the first ones, top_k keeps all, greedy takes the first."""
    case = wide_case(np.random.default_rng(0), 1024, 3, (-1,), spread=0.0, dtype="float32")
    case["temperature"] = np.array([1, 1, 0], np.float32)
    case["top_p"], case["top_k"] = np.array([0.5, 1, 1], np.float32), np.array([0, 7, 0])
    _, _, drawn = host_lab.verify(host_lab.kernels(), case)
    assert drawn[0] < 512 and drawn[2] == 0
    assert not assert_same(lambda feeds: host_lab.verify(host_lab.kernels(), feeds), case)


# Chunks of equal masses, of which the scan's sums differ by rounding from those that a thread makes of its own run.
UNEVEN = [61, 84, 111, 113, 126, 135, 154, 186, 227, 244, 265, 271, 275, 279]
UNEVEN += [281, 316, 326, 331, 353, 365, 372, 395, 407, 421, 466, 471]


@pytest.mark.parametrize("is_refused", [False, True], ids=["own distribution", "residual"])
def test_a_masked_entry_is_not_drawn_where_sums_differ_by_rounding(is_refused):
    """26 tokens of equal mass, all others impossible, and a draw exactly in the middle."""
    vocab, tokens, drafted = 128256, 256 * np.array(UNEVEN) + 100, 7
    logits = np.full((1, 2, vocab), -np.inf, np.float32)
    logits[..., tokens] = 3.0
    dists = np.full((1, 2, vocab), 1 / vocab, np.float32)
    if is_refused:
        logits[..., drafted], dists[0, 1] = 3.0, np.eye(1, vocab, drafted, dtype=np.float32)
    case = {
        "logits": logits,
        "tokens": np.array([[0, drafted]]),
        "parents": np.array([[-1, 0 if is_refused else -1]]),
        "draft_probs": dists,
        "uniforms": np.array([[[0.9, 0.5], [0.9999, 0.3]]], np.float32),
        "temperature": np.ones(1, np.float32),
        "top_k": np.zeros(1, np.int64),
        "top_p": np.ones(1, np.float32),
    }
    with np.errstate(invalid="ignore"):
        [_], [num_accepted], [token] = host_lab.verify(host_lab.kernels(), case)
    assert num_accepted == 0
    assert token in tokens


def test_a_residual_of_rounding_alone_gives_a_possible_token():
    """Draft and target probs differ by rounding only, which differs between the pass over the row and the draw."""
    vocab = 600
    for logit, ulps in itertools.product(np.float32([-1.3, -2.7, -5.1, -8.3, -9.9, -10.7]), range(-3, 4)):
        logits = np.full((1, 2, vocab), logit, np.float32)
        logits[..., 5], logits[..., ::256] = 0.0, -np.inf  # each chunk begins with a token that is impossible
        held = np.isfinite(logits[0, 0])
        mass = np.float32(np.exp(np.float64(logit)) / np.exp(logits[0, 0][held].astype(np.float64)).sum())
        dists = np.full((1, 2, vocab), mass + ulps * np.spacing(mass), np.float32)
        dists[..., 5] = 1.0
        case = {
            "logits": logits,
            "tokens": np.array([[0, 256]]),
            "parents": np.array([[-1, 0]]),
            "draft_probs": dists,
            "uniforms": np.array([[[0.9, 0.4], [0.9, 0.4]]], np.float32),
            "temperature": np.ones(1, np.float32),
            "top_k": np.zeros(1, np.int64),
            "top_p": np.ones(1, np.float32),
        }
        [_], [num_accepted], [token] = host_lab.verify(host_lab.kernels(), case)
        assert num_accepted == 0
        assert held[token], (logit, ulps)


def test_a_draw_of_one_gives_the_last_possible_token():
    """Uniforms end below 1; one that was rounded up must not leave the distribution."""
    case = wide_case(np.random.default_rng(0), 2049, 1, (-1, 0), spread=1.0, dtype="float32")
    case["logits"][..., 700:], case["tokens"][:, 1] = -np.inf, 800  # the draft is impossible: it is refused
    case["uniforms"][...], case["draft_probs"] = 1.0, np.eye(2049, dtype=np.float32)[[[800, 800]]]
    assert host_lab.verify(host_lab.kernels(), case)[2].tolist() == [699]


@pytest.mark.parametrize("temperature", [1e-39, 2.9e-39, 1e-30, 1e30])
def test_extreme_temperatures(temperature):
    case = wide_case(np.random.default_rng(0), 1025, 1, (-1,), spread=1.0, dtype="float32", temperature=temperature)
    case["logits"] = -np.abs(case["logits"]) - np.float32(1e-3)
    case["logits"][0, 0, 700] = 0
    case["uniforms"][..., 1] = 0.4
    [_], [_], [token] = host_lab.verify(host_lab.kernels(), case)
    with np.errstate(over="ignore", invalid="ignore"):
        assert token == spec_verify(**case)[2][0]
    assert (token == 700) == (temperature < 1)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("warp", CUTS, ids=str)
def test_rows_of_nan_give_some_token(warp, value):
    case = wide_case(np.random.default_rng(0), 1025, 2, TREE, spread=1.0, dtype="float32", **warp)
    case["logits"][0, :, 3::7], case["logits"][1] = value, value
    path, num_accepted, token = host_lab.verify(host_lab.kernels(), case)
    assert ((token >= 0) & (token < 1025)).all()
    assert (path[:, 0] == 0).all() and ((num_accepted >= 0) & (num_accepted < 7)).all()


@given(data=st.data())
@settings(max_examples=120, deadline=None, derandomize=True, database=None)
def test_small_cases_with_many_ties(data):
    nodes, vocab = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    levels = st.sampled_from([-2.0, -0.0, 0.0, 1.0, 1.5])
    row = st.lists(levels, min_size=vocab, max_size=vocab)
    parents = [-1] + [data.draw(st.integers(-1, node - 1)) for node in range(1, nodes)]
    grid = st.integers(0, 63).map(lambda i: (i + 0.37) / 64)  # off the fractions of equal masses
    case = {
        "logits": np.array([[data.draw(row) for _ in range(nodes)]], np.float32),
        "tokens": np.array([[data.draw(st.integers(0, vocab - 1)) for _ in range(nodes)]]),
        "parents": np.array([parents]),
        "draft_probs": np.zeros((1, nodes, 1), np.float32),
        "uniforms": np.array([[[data.draw(grid), data.draw(grid)] for _ in range(nodes)]], np.float32),
        "temperature": np.array([data.draw(st.sampled_from([0.0, 0.5, 1.0, 1.3]))], np.float32),
        "top_k": np.array([data.draw(st.integers(0, vocab + 1))]),
        "top_p": np.array([data.draw(st.sampled_from([1.0, 0.97, 0.61, 0.29, 0.03]))], np.float32),
    }
    if vocab > 1 and data.draw(st.booleans()):
        weights = np.array(data.draw(st.lists(st.integers(0, 5), min_size=nodes * vocab, max_size=nodes * vocab)))
        dists = (weights + 1e-3).reshape(1, nodes, vocab)
        case["draft_probs"] = (dists / dists.sum(-1, keepdims=True)).astype(np.float32)
    assert_same(lambda feeds: host_lab.verify(host_lab.kernels(), feeds), case)


def test_the_result_does_not_depend_on_the_order_of_threads_and_blocks():
    case = verify_case(np.random.default_rng(8), 1025, is_chain=False, has_probs=True, heat="sampled")
    first = host_lab.verify(host_lab.kernels(), case, seed=0)
    for seed in range(1, 6):
        assert same(host_lab.verify(host_lab.kernels(), case, seed=seed), first)


@pytest.mark.parametrize("options", [("-DSPECCOMPILE_RESOLVE_THREADS=64",), ("-DSPECCOMPILE_RESOLVE_THREADS=1024",)])
def test_other_block_sizes(options):
    """Loops over chunks and bins, of which one iteration suffices at 512 threads."""
    kernels, rng = host_lab.kernels(*options), np.random.default_rng(4)
    for number in range(14):
        heat, is_chain, has_probs = KINDS[number % len(KINDS)]
        vocab = 17000 if number in (6, 7) else 300  # 67 chunks, more than 64 threads
        case = verify_case(rng, vocab, is_chain=is_chain, has_probs=has_probs, heat=heat)
        assert_same(lambda feeds: host_lab.verify(kernels, feeds), case)


def test_division_is_that_of_float32():
    import ctypes

    rng = np.random.default_rng(6)
    for divisor in (1.0, 0.7, 0.1, 1.9999999, 3.0, 1e-3, 1e-30, 1e30):
        bits = rng.integers(0, 2**32, 200000, dtype=np.uint32)
        x = np.concatenate((bits.view(np.float32), rng.normal(size=200000).astype(np.float32), np.float32([0, -0.0])))
        x = np.ascontiguousarray(x[~np.isnan(x)])
        got = np.empty_like(x)
        host_lab.kernels().host_divide(
            x.ctypes.data_as(ctypes.c_void_p), ctypes.c_float(divisor), got.ctypes.data_as(ctypes.c_void_p), len(x)
        )
        with np.errstate(over="ignore", under="ignore"):
            np.testing.assert_array_equal(got, x / np.float32(divisor))
