# SPDX-License-Identifier: Apache-2.0
"""Draws by race have the distribution that they are given, and agree with a draft's as often as the theory says."""

from collections.abc import Callable

import numpy as np
import pytest

from speccompile.core import sampling as module
from speccompile.core.sampling import PRIME, SAMPLER_VERSION, race, race_draws, race_times, uniforms

STATES = [
    [[1242869731, 1052837525, 1438037530, 1617257005], [294990160, 1747592353, 1642291370, 1750033524]],
    [[1875516122, 1982717218, 301431954, 571140107], [2055499651, 708496578, 1330293026, 2070119849]],
]


def draws_of(num: int, seed: int = 0) -> np.ndarray:
    return race_draws(np.array([seed], np.uint64), np.arange(num)[None])[0]


def test_the_texts_of_seeds_are_a_contract():
    """A change of these numbers changes the text of every seed: it needs another SAMPLER_VERSION."""
    assert SAMPLER_VERSION == 3
    draws = race_draws(np.array([7, 2**63 + 5], np.uint64), np.array([[3, 4], [0, 2**33]]))
    states = np.rint(-np.expm1(-race_times(draws, [0, 1, 8191, 200000])) * 2**31 - 0.5).astype(np.int64)
    assert states.tolist() == STATES


def by_definition(draw: np.ndarray, token: int) -> int:
    first, second = (int(float(d) * 2**24) * 128 + 1 for d in draw)
    state = (first * (token + 1) + second) % PRIME
    for key in (first, second, first, second):
        state = (state * state + key) % PRIME
    return state


def test_integers_are_those_of_the_definition():
    tokens = np.array([0, 1, 2, 63, 64, 524287, 2**20])
    draws = np.concatenate((draws_of(50), np.float32([[0, 0], [1 - 2**-24, 1 - 2**-24]])))
    for draw in draws:
        wanted = [-np.log1p(-(by_definition(draw, int(t)) + 0.5) / 2**31) for t in tokens]
        np.testing.assert_array_equal(race_times(draw, tokens), wanted)


def test_the_draws_of_a_race_are_of_its_own_lane():
    seeds, positions = np.array([5], np.uint64), np.arange(40)[None]
    mine = race_draws(seeds, positions)
    others = [uniforms(seeds, positions, lane) for lane in range(3)]
    assert len({*mine.ravel().tolist(), *np.ravel(others).tolist()}) == 200


def least_for_first(probs: list[float], second: np.ndarray, rates: Callable[..., np.ndarray]) -> np.ndarray:
    """Returns the uniform number below which token 0 wins, by bisection, for those of token 1."""
    low, high = np.zeros_like(second), np.ones_like(second)
    for _ in range(60):
        middle = (low + high) / 2
        wins = rates(np.array(probs), np.stack((middle, second), axis=-1)).argmax(-1) == 0
        low, high = np.where(wins, middle, low), np.where(wins, high, middle)
    return low


def rates_of_race(probs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    return probs / -np.log1p(-np.minimum(numbers, 1 - 2**-53))


PAIRS = ([2 / 3, 1 / 3], [0.75, 0.25], [0.5, 0.5], [0.9, 0.1], [8 / 9, 1 / 9])


def variation(rates: Callable[..., np.ndarray]) -> float:
    """Returns the worst total variation of two tokens; the integrand is a polynomial of the other's number."""
    nodes, weights = np.polynomial.legendre.leggauss(16)
    numbers, weights = (nodes + 1) / 2, weights / 2
    return max(abs(float(weights @ least_for_first(probs, numbers, rates)) - probs[0]) for probs in PAIRS)


def test_each_token_wins_with_its_probability(monkeypatch):
    def rates(probs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        monkeypatch.setattr(module, "race_times", lambda draws, tokens: -np.log1p(-np.minimum(numbers, 1 - 2**-53)))
        return np.eye(2)[race(np.broadcast_to(probs, numbers.shape), numbers)]

    assert variation(rates_of_race) < 1e-12
    assert variation(rates) < 1e-12


WRONG: dict[str, Callable[..., np.ndarray]] = {
    "uniform times": lambda probs, numbers: probs / numbers,
    "the greatest time": lambda probs, numbers: probs * -np.log1p(-np.minimum(numbers, 0.999)),
    "squares": lambda probs, numbers: probs**2 / -np.log1p(-np.minimum(numbers, 1 - 2**-53)),
    "times that are added": lambda probs, numbers: probs + numbers,
    "uniform noise on logarithms": lambda probs, numbers: np.log(probs) + numbers,
}


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_race_is_noticed(wrong):
    assert variation(WRONG[wrong]) > 1e-3


def test_impossible_tokens_never_win_and_of_equal_ones_the_first_does():
    draws = draws_of(300)
    assert (race(np.tile(np.float32([0, 1, 0]), (300, 1)), draws) == 1).all()
    assert set(race(np.tile(np.float32([0, 0.5, 0, 0.5]), (300, 1)), draws).tolist()) == {1, 3}
    assert race(np.full(4, np.nan, np.float32), draws[0]) == 0


def test_rows_of_one_token_need_no_times(monkeypatch):
    draws = draws_of(30)
    greedy = np.eye(7, dtype=np.float32)[np.arange(30) % 7]
    beside = np.concatenate((greedy, np.full((1, 7), 1 / 7, np.float32)))  # then the times decide all rows
    assert race(beside, draws_of(31))[:30].tolist() == (np.arange(30) % 7).tolist()
    monkeypatch.setattr(module, "race_times", lambda *given: pytest.fail("times were made"))
    assert race(greedy, draws).tolist() == (np.arange(30) % 7).tolist()
    assert race(greedy[:0], draws[:0]).tolist() == []


@pytest.mark.distribution
def test_times_are_exponential_and_independent():
    from scipy import stats

    draws = draws_of(100_000)
    times = race_times(draws, [0, 1, 2, 8191, 131071])
    for column in times.T:
        assert stats.kstest(column, "expon").pvalue > 1e-3
    numbers = -np.expm1(-times)
    for one, other in ((0, 1), (1, 2), (0, 3), (3, 4)):
        cells = np.histogram2d(numbers[:, one], numbers[:, other], bins=20, range=((0, 1), (0, 1)))[0]
        assert stats.chisquare(cells.ravel()).pvalue > 1e-3
    later = np.histogram2d(numbers[1:, 0], numbers[:-1, 0], bins=20, range=((0, 1), (0, 1)))[0]
    assert stats.chisquare(later[:, :].ravel()).pvalue > 1e-3
    rows = race_times(draws_of(400, seed=3)[:, None], np.arange(8192))[:, 0]
    least = np.sort(rows, axis=1)[:, :3] * 8192
    assert stats.kstest(least[:, 0], "expon").pvalue > 1e-3  # the winners of a large vocabulary
    assert stats.chisquare(np.bincount(rows.argmin(1) * 16 // 8192, minlength=16)).pvalue > 1e-3


@pytest.mark.distribution
def test_tokens_and_matches_have_their_probabilities():
    from scipy import stats

    num, rng = 100_000, np.random.default_rng(1)
    target, draft = rng.dirichlet(np.full(12, 0.5), size=2)
    draws = draws_of(num, seed=9)
    drawn, drafted = (race(np.broadcast_to(p, (num, 12)), draws) for p in (target, draft))
    assert stats.chisquare(np.bincount(drawn, minlength=12), target * num).pvalue > 1e-3
    ratio = np.maximum(target[None] / target[:, None], draft[None] / draft[:, None])  # Daliri et al. 2024
    match = (1 / ratio.sum(axis=1)).sum()
    assert abs((drawn == drafted).mean() - match) < 4 * (match * (1 - match) / num) ** 0.5
    distance = np.abs(target - draft).sum() / 2
    assert match >= (1 - distance) / (1 + distance)
