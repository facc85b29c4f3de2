# SPDX-License-Identifier: Apache-2.0
"""Decides whether one more draft token is worth its time: one rule for every method.

A step is expected to bring E tokens in C milliseconds. Another p tokens that take another c milliseconds increase
tokens per millisecond if (E + p) / (C + c) > E / C, that is p C > E c. The rule decides whether to draft at all,
whether to expand a tree once more, and how many of the known candidates to score.

Deterministic drafts never change the text, so the sequences of a batch decide together, by costs corrected online. The
text of drawn drafts depends on their number: each sequence decides alone, by the bundle's costs (`recorded`).
"""

from __future__ import annotations

import bisect
import copy
import logging
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from speccompile.core.jobs import StepCosts
from speccompile.core.protocols import StepTimes

_log = logging.getLogger(__name__)

TYPICAL_MEMORY = 0.95  # weight of the past in the size of a typical tree
FIRST_PLAIN, PLAIN_STEPS = 8, 32  # of a row of plain steps, the first correct the costs, and then one of so many
FIRST_KEPT = 0.75  # see `Budget.goes_on`; on the high side, so that deep trees are tried
KEPT_RECOVERY = 0.005  # pull towards it in a step that grew no further than one depth: they are tried again

MACHINE_WEIGHT = 1 / 5  # of one step in a factor that shapes share
SHAPE_WEIGHT, FIRST_SEEN = 1 / 100, 3  # of one step in the factor of its own shape; at first 1 / (FIRST_SEEN + steps)
MAX_SURPRISE = 0.2  # of a log time, as other processes make some steps long; nothing makes them short
KEPT_STEPS = 8  # steps that a table of costs is used for
FORGOTTEN_STEPS = 250  # steps with as many sequences after which a shape that none of them used is forgotten


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
        draft: recorded costs of a run, by nodes; None: drafting runs no graph. Without costs time does not limit it.
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
        """Returns whether a typical tree, `accepted` draft tokens on average, beats a plain step per token."""
        self._recorded_ms = 0.0  # the step before may have gone unobserved, as where drafts may be drawn
        if not self.weighs_time or self.least:
            return True
        costs = self.costs.of(num_slots)
        more_ms = costs.scores[min(round(self._drafts), self.max_nodes)] - costs.scores[0]
        more_ms += self._runs * costs.drafts[1] * costs.factor
        self.outlook = Outlook(more_ms / self._drafts / costs.scores[0], min(accepted / self._drafts, 1.0))
        is_worth = _is_worth(accepted, more_ms, 1.0, costs.scores[0])
        if _log.isEnabledFor(logging.DEBUG):
            cost, share = self.outlook
            _log.debug(
                "drafts %s: %.2f of a step each, %.0f %% accepted", "on" if is_worth else "off", cost, 100 * share
            )
        return is_worth

    def floor(self, num_slots: int) -> float:
        """Returns the probability below which scoring a path takes more time than it is expected to save."""
        if self.is_forced or self.least:
            return 0.0
        if not self.weighs_time:
            return self._min_path
        scores = self.costs.of(num_slots).scores
        least = min(map(operator.sub, scores[1:], scores), default=0.0)
        return max(self._min_path, least / scores[0])

    def spend(self, num_slots: int, num_nodes: int = 1) -> None:
        """Counts the time of a draft run of `num_nodes` nodes per sequence."""
        self._recorded_ms += self.costs.of(num_slots).drafts[num_nodes]

    def goes_on(self, gains: Sequence[float], num_slots: int, depth: int, reach: float, num_nodes: int = 1) -> bool:
        """Returns whether the candidates at a depth are worth another expansion, after the run that gave them.

        Args:
            gains: as in `size`, at most `max_nodes`.
            reach: sum of their paths' probabilities over all sequences: the tokens that the expansion would bring if
                the draft were always right. The expected gain is the share of it that expansions kept so far.
            num_nodes: nodes per sequence that the run before read, at least 1.
        """
        costs = self.costs.of(num_slots)
        if depth == 1 or not self.runs_once:
            self._recorded_ms += costs.drafts[num_nodes]
        if reach <= 0:
            return False
        if depth > 1 and self._last_reach > 0:
            self._kept += (1 - TYPICAL_MEMORY) * (reach / self._last_reach - self._kept)
        self._last_reach = reach
        if depth >= self.max_depth:
            return False
        if not self.weighs_time or depth < self.least:
            return True
        num, expected, cost_ms = self.best(gains, num_slots, self._recorded_ms * costs.factor)
        more_ms = 0.0 if self.runs_once else costs.drafts[min(self.width, self.max_nodes)] * costs.factor
        more_ms += max(costs.scores[min(num + 1, self.max_nodes)] - costs.scores[num], 0.0)
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
        costs = self.costs.of(1)
        scores, draft_ms = costs.scores, costs.drafts[1] * costs.factor
        num_runs = min(num_drafts, 1) if self.runs_once else num_drafts
        next_ms = 0.0 if self.runs_once and num_runs else draft_ms
        more_ms = next_ms + max(scores[num_drafts + 1] - scores[num_drafts], 0.0)
        return _is_worth(gain, more_ms, expected, scores[num_drafts] + num_runs * draft_ms)

    def size(self, gains: Sequence[float], num_slots: int) -> int:
        """Returns how many draft tokens to score, the same number in every sequence that has as many.

        Args:
            gains: tokens that the first, the second ... draft token brings, all sequences together; `max_nodes` at
                most.
        """
        costs = self.costs.of(num_slots)
        num, _, _ = self.best(gains, num_slots, self._recorded_ms * costs.factor)
        if self.weighs_time and not self.least:
            self._drafts += (1 - TYPICAL_MEMORY) * (num - self._drafts)
            if costs.drafts[1]:
                self._runs += (1 - TYPICAL_MEMORY) * (self._recorded_ms / costs.drafts[1] - self._runs)
        return num

    def best(
        self, gains: Sequence[float], num_slots: int, spent_ms: float = 0.0, *, held: int = 0, expected: float = 0.0
    ) -> tuple[int, float, float]:
        """Returns (draft tokens, tokens expected, milliseconds) of the best number of draft tokens.

        Args:
            gains: see `size`; `max_nodes` at most, `held` included.
            held: draft tokens of a sequence that are scored in any case, before these.
            expected: of them, how many are expected to be accepted, all sequences together.
        """
        expected += num_slots
        if not self.weighs_time:
            return held + len(gains), expected + sum(gains), 1.0
        scores = self.costs.of(num_slots).scores
        best, best_expected, best_ms = held, expected, scores[held] + spent_ms
        for num, gain in enumerate(gains, held + 1):
            expected += gain
            cost_ms = scores[num] + spent_ms
            if num <= self.least or expected * best_ms > best_expected * cost_ms:
                best, best_expected, best_ms = num, expected, cost_ms
        return best, best_expected, best_ms

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        """Corrects the costs with the times of a step of `num_nodes` nodes per sequence, root and padding included."""
        recorded_ms, self._recorded_ms = self._recorded_ms, 0.0
        self._num_plain = 0 if num_nodes > 1 or recorded_ms else self._num_plain + 1
        # Many plain steps in a row are all alike, and learning takes time.
        if self._learns and (self._num_plain <= FIRST_PLAIN or self._num_plain % PLAIN_STEPS == 0):
            self.costs.observe(num_slots, num_nodes, recorded_ms, times)


def _is_measured(costs: StepCosts) -> bool:
    return bool(costs.ms_by_nodes) and all(ms > 0 for _, ms in costs.ms_by_nodes)


def _is_worth(tokens: float, ms: float, expected: float, cost_ms: float) -> bool:
    """Returns whether `tokens` more in `ms` more milliseconds improve on `expected` tokens in `cost_ms`."""
    return tokens * cost_ms > expected * ms


@dataclass(slots=True)
class BatchCosts:
    """Costs and measurements of steps with one number of sequences.

    `recorded` and `drafts` are recorded milliseconds of scoring and of a draft run, by nodes per sequence.
    """

    recorded: tuple[float, ...] = ()
    drafts: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()  # milliseconds of a step without its drafting, by draft tokens per sequence
    num_left: int = 0  # steps until `scores` are computed again; 0: now
    factor: float = 1.0  # measured time of a draft run / recorded time
    machine: float | None = None  # log(scoring / recorded) of recent steps; None: not measured
    factors: dict[int, float] = field(default_factory=dict)  # by nodes: log(scoring / recorded), less `machine`
    num_seen: dict[int, int] = field(default_factory=dict)  # steps by nodes; the first, with allocation, does not count
    last: dict[int, int] = field(default_factory=dict)  # `num_learnt` after the last step by nodes, of `factors`
    num_learnt: int = 0
    rest_ms: list[float | None] = field(default_factory=lambda: [None, None])  # without, with drafts
    draft: float | None = None  # log(drafting time / recorded time); None: not measured

    def log_factor(self, nodes: int) -> float:
        """Returns the log factor of a shape: linear between measured shapes, constant beyond them."""
        known = self.factors.get(nodes)
        if known is not None or not self.factors:
            return known or 0.0
        seen = sorted(self.factors)
        at = bisect.bisect(seen, nodes)
        if at in (0, len(seen)):
            return self.factors[seen[min(at, len(seen) - 1)]]
        low, high = seen[at - 1], seen[at]
        share = (nodes - low) / (high - low)
        return (1 - share) * self.factors[low] + share * self.factors[high]

    def forget(self) -> None:
        """Forgets the factors of shapes that were not used for `FORGOTTEN_STEPS`: they cost what neighbours say."""
        for nodes in [nodes for nodes, step in self.last.items() if self.num_learnt - step > FORGOTTEN_STEPS]:
            del self.last[nodes], self.factors[nodes]
            self.num_seen[nodes] = 1


class OnlineCosts:
    """Costs by the number of sequences and nodes.

    A step of b sequences with n nodes each is assumed to cost as much as one of b * n nodes until such steps were
    measured. A step's time is the recorded one times a factor of the machine, which all shapes of a batch size share
    and which moves quickly, times the factor of its shape, which moves slowly and is forgotten out of use.

    Args:
        target: recorded costs of scoring, by nodes; not empty.
        draft: recorded costs of a draft run, by nodes; None: drafting runs no graph.
        max_drafts: most draft tokens of a sequence in a step.
    """

    def __init__(self, target: StepCosts, draft: StepCosts | None, max_drafts: int) -> None:
        self.target, self.draft, self.max_drafts = target, draft, max_drafts
        self._latest = 0.0  # `machine` of the batch size measured last: that of the others until they are measured
        self._batches: dict[int, BatchCosts] = {}
        self._had_drafts = True

    def of(self, num_slots: int) -> BatchCosts:
        """Returns the costs of steps with so many sequences."""
        batch = self._batches.get(num_slots) or self._batches.setdefault(num_slots, BatchCosts())
        if not batch.recorded:
            nodes = range(0, num_slots * (self.max_drafts + 2), num_slots)
            batch.recorded = tuple(map(self.target.ms, nodes))
            batch.drafts = tuple(map(self.draft.ms, nodes)) if self.draft is not None else (0.0,) * len(nodes)
        if batch.num_left <= 0:
            batch.forget()
            machine = self._latest if batch.machine is None else batch.machine
            rests = [rest if rest is not None else batch.rest_ms[1 - i] or 0.0 for i, rest in enumerate(batch.rest_ms)]
            batch.scores = tuple(
                recorded_ms * math.exp(machine + batch.log_factor(nodes)) + rests[nodes > 1]
                for nodes, recorded_ms in enumerate(batch.recorded[1:], 1)
            )
            batch.factor = math.exp(machine if batch.draft is None else batch.draft)
            batch.num_left = KEPT_STEPS
        return batch

    def scores(self, num_slots: int) -> tuple[float, ...]:
        """Returns the milliseconds of a step without its drafting, for 0 to `max_drafts` draft tokens per sequence."""
        return self.of(num_slots).scores

    def draft_ms(self, num_slots: int, num_nodes: int = 1) -> float:
        """Returns the milliseconds of a draft run of `num_nodes` nodes per sequence."""
        batch = self.of(num_slots)
        return batch.drafts[num_nodes] * batch.factor

    def observe(self, num_slots: int, num_nodes: int, recorded_draft_ms: float, times: StepTimes) -> None:
        """Corrects the costs with the times of a step.

        Args:
            num_nodes: nodes that the target scored per sequence, root and padding included.
            recorded_draft_ms: recorded cost of its draft runs; 0: nothing was drafted.
        """
        batch = self._batches.get(num_slots) or self._batches.setdefault(num_slots, BatchCosts())
        batch.num_left -= 1
        had_drafts, self._had_drafts = self._had_drafts, recorded_draft_ms > 0
        num = batch.num_seen[num_nodes] = batch.num_seen.get(num_nodes, 0) + 1
        if num == 1:
            return
        self._learn_score(batch, num_nodes, math.log(times.score_s * 1e3 / self.target.ms(num_slots * num_nodes)))
        has_drafts = num_nodes > 1
        rest_ms, known = max(times.step_s - times.propose_s - times.score_s, 0.0) * 1e3, batch.rest_ms[has_drafts]
        batch.rest_ms[has_drafts] = (
            rest_ms if known is None else known + MACHINE_WEIGHT * (min(rest_ms, 2 * known + 0.01) - known)
        )
        # A draft that did not run in the step before first reads the tokens it missed: not a cost of a draft token.
        if recorded_draft_ms > 0 and had_drafts:
            seen = math.log(times.propose_s * 1e3 / recorded_draft_ms)
            batch.draft = seen if batch.draft is None else corrected(batch.draft, seen)
            batch.factor = math.exp(batch.draft)

    def _learn_score(self, batch: BatchCosts, num_nodes: int, seen: float) -> None:
        if batch.machine is None:
            batch.machine = seen
        if num_nodes not in batch.factors:
            batch.num_left = 0
        known = batch.log_factor(num_nodes)
        surprise = min(seen - known - batch.machine, MAX_SURPRISE)
        batch.machine = self._latest = batch.machine + MACHINE_WEIGHT * surprise
        batch.factors[num_nodes] = known + max(SHAPE_WEIGHT, 1 / (FIRST_SEEN + batch.num_seen[num_nodes])) * surprise
        batch.num_learnt += 1
        batch.last[num_nodes] = batch.num_learnt


def corrected(known: float, seen: float) -> float:
    """Returns the log of a factor after a step that shows `seen`."""
    return known + MACHINE_WEIGHT * min(seen - known, MAX_SURPRISE)
