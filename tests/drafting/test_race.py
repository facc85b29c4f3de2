# SPDX-License-Identifier: Apache-2.0
"""Drafts of sequences that sample are those that do best in the target's race."""

from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.core.sampling import SamplingParams, race, race_draws, warp
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES, NODE_PROBS
from speccompile.drafting import race as module
from speccompile.drafting.race import order_candidates, raced_candidates

VOCAB = 40
PARAMS = [SamplingParams(temperature=1.0), SamplingParams(), SamplingParams(temperature=0.6, top_k=5, top_p=0.8)]


def batch_of(params: list[SamplingParams], start: int) -> SimpleNamespace:
    def draws(depth: int) -> np.ndarray:
        return race_draws(np.arange(len(params), dtype=np.uint64), np.full((len(params), 1), start + depth))[:, 0]

    sequences = [SimpleNamespace(sampling=p) for p in params]
    return SimpleNamespace(sequences=sequences, is_greedy=all(p.is_greedy for p in params), race_draws=draws)


def dists_of(start: int, params: list[SamplingParams]) -> tuple[np.ndarray, np.ndarray]:
    """Returns distributions at temperature 1 and warped, [batch, 1, vocab]."""
    logits = (np.random.default_rng(start).normal(size=(len(params), 1, VOCAB)) * 2).astype(np.float32)
    heats = [[p.temperature for p in params], [p.top_k for p in params], [p.top_p for p in params]]
    ones = np.ones(len(params))
    return warp(logits, ones, 0 * ones.astype(np.int64), ones), warp(logits, *heats)


@pytest.mark.parametrize("is_warped", [False, True])
def test_a_draft_equal_to_the_target_wins_its_race(is_warped, monkeypatch):
    monkeypatch.setattr(module, "SHARPNESS", 1.0)
    for start in range(60):
        batch = batch_of(PARAMS, start)
        plain, warped = dists_of(start, PARAMS)
        order = np.argsort(-plain, axis=-1, kind="stable")
        given = np.take_along_axis(warped if is_warped else plain, order, axis=-1)
        tokens, sure = order_candidates(batch, 2, order, given, is_warped=is_warped)  # type: ignore[arg-type]
        wanted = race(warped[:, 0], batch.race_draws(2))
        assert tokens[:, 0, 0].tolist() == wanted.tolist()
        np.testing.assert_array_equal(tokens[1], order[1])  # greedy slots keep theirs
        np.testing.assert_array_equal(sure[1], given[1])
        assert (np.diff(sure[[0, 2]], axis=-1) <= 0).all() and np.allclose(sure[[0, 2]].sum(-1), 1, atol=1e-5)


def test_siblings_are_those_that_finish_next():
    draws = race_draws(np.arange(3, dtype=np.uint64), np.array([[9]] * 3))[:, 0]
    plain, _ = dists_of(3, [PARAMS[0]] * 3)
    order = np.argsort(-plain, axis=-1, kind="stable")
    batch = batch_of([PARAMS[0]] * 3, 8)
    tokens, _ = order_candidates(batch, 1, order, np.take_along_axis(plain, order, axis=-1))  # type: ignore[arg-type]
    rates = plain[:, 0].astype(np.float64) ** module.SHARPNESS
    for sibling in range(4):
        assert tokens[:, 0, sibling].tolist() == race(rates, draws).tolist()
        np.put_along_axis(rates, tokens[:, 0, sibling, None], 0, axis=-1)


@pytest.mark.parametrize("has_map", [False, True])
def test_the_drafts_own_distribution_races_where_it_is_given(has_map):
    d2t = np.random.default_rng(0).permutation(VOCAB) if has_map else None
    for start in range(20):
        batch, (plain, warped) = batch_of(PARAMS, start), dists_of(start, PARAMS)
        best = plain.argmax(-1)[..., None]
        outputs = {CANDIDATES: best, CANDIDATE_PROBS: np.take_along_axis(plain, best, axis=-1), NODE_PROBS: warped}
        tokens, _ = raced_candidates(batch, 1, outputs, d2t)  # type: ignore[arg-type]
        columns = np.arange(VOCAB) if d2t is None else d2t
        rates = np.zeros((3, VOCAB))
        rates[:, columns] = warped[:, 0].astype(np.float64) ** module.SHARPNESS
        wanted = race(rates, batch.race_draws(1))
        assert tokens[[0, 2], 0, 0].tolist() == wanted[[0, 2]].tolist()
        assert tokens[1, 0, 0] == columns[best[1, 0, 0]]


@pytest.mark.parametrize("num", [1, 3, VOCAB - 1])
def test_as_many_come_back_as_there_were_candidates_and_these_are_the_first(num):
    batch, (plain, warped) = batch_of(PARAMS, 5), dists_of(5, PARAMS)
    best = np.argsort(-plain, axis=-1, kind="stable")[..., :num]
    outputs = {CANDIDATES: best, CANDIDATE_PROBS: np.take_along_axis(plain, best, axis=-1), NODE_PROBS: warped}
    tokens, sure = raced_candidates(batch, 1, outputs)  # type: ignore[arg-type]
    every = np.tile(np.arange(VOCAB), (3, 1, 1))
    all_tokens, all_sure = order_candidates(batch, 1, every, warped, is_warped=True)  # type: ignore[arg-type]
    # Of a token that the warp cuts, the time is without meaning: the third has five at most.
    kept = [min(num, np.count_nonzero(row)) for row in warped[:, 0]]
    for slot in (0, 2):
        assert tokens[slot, 0, : kept[slot]].tolist() == all_tokens[slot, 0, : kept[slot]].tolist()
        np.testing.assert_allclose(sure[slot, 0, : kept[slot]], all_sure[slot, 0, : kept[slot]], rtol=1e-6)
    assert tokens.shape == sure.shape == (3, 1, num) and tokens[1].tolist() == best[1].tolist()


def test_one_candidate_without_a_distribution_is_left_as_it_is():
    tokens, sure = np.array([[[3]]]), np.float32([[[0.4]]])
    made = order_candidates(batch_of(PARAMS[:1], 0), 1, tokens, sure)  # type: ignore[arg-type]
    assert made[0] is tokens and made[1] is sure
