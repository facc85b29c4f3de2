# SPDX-License-Identifier: Apache-2.0
"""Decides whether one more draft token is worth its time: one rule for every method.

A step is expected to bring E tokens in C milliseconds. Another p tokens that take another c milliseconds increase
tokens per millisecond if (E + p) / (C + c) > E / C, that is p C > E c. The rule decides whether to draft at all,
whether to expand a tree once more, and how many of the known candidates to score.

Deterministic drafts never change the text, so the sequences of a batch decide together, by costs that are corrected
online. Where drafts are drawn, the text depends on how many there are: each sequence decides alone, by the costs
recorded in the bundle (`recorded`), never by a clock.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from speccompile.core.jobs import StepCosts
from speccompile.core.protocols import StepTimes
from speccompile.drafting.candidates import Candidates
from speccompile.drafting.step_costs import OnlineCosts

_log = logging.getLogger(__name__)
TYPICAL_MEMORY = 0.95  # weight of the past in the size of a typical tree

FIRST_PLAIN, PLAIN_STEPS = 8, 32  # of a row of plain steps, the first correct the costs, and then one of so many
FIRST_KEPT = 0.75  # see `Budget.goes_on`; on the high side, so that deep trees are tried
KEPT_RECOVERY = 0.005  # pull towards it in a step that grew no further than one depth: they are tried again


class Outlook(NamedTuple):
    """What is expected of a draft token of a typical tree."""

    cost: float
    accepted: float


@runtime_checkable
class Weighs(Protocol):
    """A proposer whose budget decides whether to draft."""

    @property
    def outlook(self) -> Outlook | None: ...


class Budget:
    """Bounds and costs of drafting.

    Args:
        max_nodes: most draft tokens to score, per sequence.
        draft: recorded costs of a draft run, by nodes; None: drafting runs no graph. Without recorded costs, time does
            not limit drafting.
        num_runs: draft runs of a whole tree; 1: all candidates come from one run; None: `max_depth`.
    """

    def __init__(
        self,
        max_nodes: int,
        max_depth: int,
        width: int,
        target: StepCosts | None = None,
        draft: StepCosts | None = None,
        *,
        is_fixed: bool = False,
        min_path: float = 0.0,
        num_runs: int | None = None,
    ) -> None:
        self.max_nodes, self.max_depth, self.width = max_nodes, max_depth, width
        target = target or StepCosts()
        self._is_known = self._learns = _is_measured(target) and (draft is None or _is_measured(draft))
        self.is_fixed, self._min_path = is_fixed, min_path
        self.is_forced = False  # this step drafts to the bounds, whatever the cost
        self.least = 0  # of this step: draft tokens of a sequence, and their depth, whatever the cost
        self.costs = OnlineCosts(target, draft, max_nodes)
        # A typical tree: draft tokens per sequence, and draft runs in units of a run with one node per sequence. The
        # first values are one draft token and one run, so that drafting is tried.
        self._drafts, self._runs = 1.0, 1.0
        self._kept, self._last_reach = FIRST_KEPT, 0.0  # share of `reach` that an expansion keeps, see `goes_on`
        self._most_runs = float(max_depth if num_runs is None else num_runs)
        self.runs_once = num_runs == 1  # further candidates need no further run of the draft
        self._recorded_ms = 0.0  # of the current step's draft runs
        self._num_plain = 0  # steps since the last one with drafts
        self.outlook: Outlook | None = None  # of the latest decision whether to draft; None: time did not decide

    def recorded(self) -> Budget:
        """Returns a budget of whole trees with the same bounds, whose costs stay those recorded in the bundle."""
        budget = copy.copy(self)
        budget._drafts, budget._runs = float(min(self.max_nodes, self.max_depth)), self._most_runs
        budget._learns, budget.costs = False, OnlineCosts(self.costs.target, self.costs.draft, self.max_nodes)
        return budget

    @property
    def weighs_time(self) -> bool:
        return self._is_known and not (self.is_fixed or self.is_forced)

    def begins(self, accepted: float, num_slots: int) -> bool:
        """Returns whether a typical tree is expected to bring more tokens per millisecond than a plain step.

        Args:
            accepted: accepted draft tokens of such a tree, the mean over all sequences of the batch.
        """
        self._recorded_ms = 0.0  # the step before may have gone unobserved, as where drafts may be drawn
        if not self.weighs_time or self.least:
            return True
        scores = self.costs.scores(num_slots)
        more_ms = scores[min(round(self._drafts), self.max_nodes)] - scores[0]
        more_ms += self._runs * self.costs.draft_ms(num_slots, num_slots)
        self.outlook = Outlook(more_ms / self._drafts / scores[0], min(accepted / self._drafts, 1.0))
        is_worth = _is_worth(accepted, more_ms, 1.0, scores[0])
        if _log.isEnabledFor(logging.DEBUG):
            cost, share = self.outlook
            _log.debug(
                "drafts %s: %.2f of a step each, %.0f %% accepted", "on" if is_worth else "off", cost, 100 * share
            )
        return is_worth

    def spend(self, num_slots: int, num_nodes: int) -> float:
        """Records a draft run of `num_nodes` nodes (over all sequences) and returns its milliseconds."""
        costs = self.costs
        if costs.draft is not None:
            self._recorded_ms += costs.draft.ms(num_nodes)
        return costs.draft_ms(num_slots, num_nodes)

    def goes_on(self, trees: Sequence[Candidates], depth: int, reach: float, spent_ms: float) -> bool:
        """Returns whether the candidates at a depth are worth another expansion.

        Args:
            reach: sum of their paths' probabilities over all sequences: the tokens that the expansion would bring if
                the draft were always right. The expected gain is the share of it that expansions kept so far.
        """
        if depth > 1 and self._last_reach > 0:
            self._kept += (1 - TYPICAL_MEMORY) * (reach / self._last_reach - self._kept)
        self._last_reach = reach
        if depth >= self.max_depth:
            return False
        if not self.weighs_time or depth < self.least:
            return True
        num_slots = len(trees)
        num, expected, cost_ms = self._best(trees, spent_ms)
        scores = self.costs.scores(num_slots)
        more_ms = 0.0 if self.runs_once else self.costs.draft_ms(num_slots, num_slots * self.width)
        more_ms += max(scores[min(num + 1, self.max_nodes)] - scores[num], 0.0)
        is_worth = _is_worth(self._kept * reach, more_ms, expected, cost_ms)
        if depth == 1 and not is_worth:
            self._kept += KEPT_RECOVERY * (FIRST_KEPT - self._kept)
        return is_worth

    def draws_on(self, num_drafts: int, expected: float, gain: float) -> bool:
        """Returns whether a sequence that decides alone draws one more token. A drawn token is always scored."""
        if num_drafts >= self.max_depth:
            return False
        if not self.weighs_time:
            return True
        scores, draft_ms = self.costs.scores(1), self.costs.draft_ms(1, 1)
        num_runs = min(num_drafts, 1) if self.runs_once else num_drafts
        next_ms = 0.0 if self.runs_once and num_runs else draft_ms
        more_ms = next_ms + max(scores[num_drafts + 1] - scores[num_drafts], 0.0)
        return _is_worth(gain, more_ms, expected, scores[num_drafts] + num_runs * draft_ms)

    def floor(self, trees: Sequence[Candidates]) -> float:
        """Returns the probability below which a path is not worth keeping.

        Such a path has `max_nodes` better ones before it, or takes more time to score than it is expected to save: a
        token of a good tree costs at most what a token costs in plain decoding.
        """
        floor = 0.0 if self.is_forced or self.least else self._min_path
        if self.weighs_time and not self.least:
            scores = self.costs.scores(len(trees))
            least = min((b - a for a, b in itertools.pairwise(scores)), default=0.0)
            floor = max(floor, least / scores[0])
        if len(trees) == 1 and len(trees[0].paths) > self.max_nodes:
            floor = max(floor, sorted(trees[0].paths, reverse=True)[self.max_nodes])
        return floor

    def size(self, trees: Sequence[Candidates], spent_ms: float = 0.0) -> int:
        """Returns how many draft tokens to score, the same number in every sequence that has as many."""
        num, _, _ = self._best(trees, spent_ms)
        if self.weighs_time and not self.least:
            one_ms = self.costs.draft_ms(len(trees), len(trees))
            self._drafts += (1 - TYPICAL_MEMORY) * (num - self._drafts)
            if one_ms:
                self._runs += (1 - TYPICAL_MEMORY) * (spent_ms / one_ms - self._runs)
        return num

    def _best(self, trees: Sequence[Candidates], spent_ms: float) -> tuple[int, float, float]:
        """Returns (draft tokens, tokens expected, milliseconds) of the best size."""
        num_slots = len(trees)
        ranked = [sorted(tree.paths[1:], reverse=True) for tree in trees]
        most = min(self.max_nodes, max(map(len, ranked), default=0))
        gains = ranked[0] if num_slots == 1 else [sum(p[n] for p in ranked if n < len(p)) for n in range(most)]
        return self.best(gains[:most], num_slots, spent_ms)

    def best(
        self, gains: Sequence[float], num_slots: int, spent_ms: float = 0.0, *, held: int = 0, expected: float = 0.0
    ) -> tuple[int, float, float]:
        """Returns (draft tokens, tokens expected, milliseconds) of the best number of draft tokens.

        Args:
            gains: tokens that the first, the second ... draft token brings, all sequences together; `max_nodes` at
                most, `held` included.
            held: draft tokens of a sequence that are scored in any case, before these.
            expected: of them, how many are expected to be accepted, all sequences together.
        """
        expected += num_slots
        if not self.weighs_time:
            return held + len(gains), expected + sum(gains), 1.0
        scores = self.costs.scores(num_slots)
        best, best_expected, best_ms = held, expected, scores[held] + spent_ms
        for num, gain in enumerate(gains, held + 1):
            expected += gain
            cost_ms = scores[num] + spent_ms
            if num <= self.least or expected * best_ms > best_expected * cost_ms:
                best, best_expected, best_ms = num, expected, cost_ms
        return best, best_expected, best_ms

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        """Corrects the costs with the times of a step.

        Args:
            num_nodes: nodes that the target scored per sequence, root and padding included.
        """
        recorded_ms, self._recorded_ms = self._recorded_ms, 0.0
        self._num_plain = 0 if num_nodes > 1 or recorded_ms else self._num_plain + 1
        # Many plain steps in a row are all alike, and learning takes time.
        if self._learns and (self._num_plain <= FIRST_PLAIN or self._num_plain % PLAIN_STEPS == 0):
            self.costs.observe(num_slots, num_nodes, recorded_ms, times)


def _is_measured(costs: StepCosts) -> bool:
    """Returns whether there are costs, and none of them is 0."""
    return bool(costs.ms_by_nodes) and all(ms > 0 for _, ms in costs.ms_by_nodes)


def _is_worth(tokens: float, ms: float, expected: float, cost_ms: float) -> bool:
    """Returns whether `tokens` more in `ms` more milliseconds improve on `expected` tokens in `cost_ms`."""
    return tokens * cost_ms > expected * ms
