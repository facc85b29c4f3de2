# SPDX-License-Identifier: Apache-2.0
"""Costs of steps and draft runs: those recorded in the bundle, corrected by measured times."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field

from speccompile.core.jobs import StepCosts
from speccompile.core.protocols import StepTimes

MACHINE_WEIGHT = 1 / 20  # of one step in the machine's factor, which all costs share
SHAPE_WEIGHT = 1 / 100  # of one step in the factor of its own shape
MAX_SURPRISE = 0.4  # bound on the error of a log time that is used: other processes make some steps long
KEPT_STEPS = 8  # steps that a table of costs is used for
FORGOTTEN_STEPS = 250  # steps with as many sequences after which a shape that none of them used is forgotten


@dataclass(slots=True)
class _Batch:
    """Measurements of steps with one number of sequences.

    Args:
        factors: by nodes per sequence, log(scoring time / recorded time) without the machine's factor.
        num_seen: steps by nodes per sequence; the first of a shape, for which memory is laid out, is no measurement.
        last: value of `num_learnt` after the last step by nodes per sequence, of those in `factors`.
        rest_ms: time besides drafting and scoring, of steps without and with drafts; None: not measured.
        draft: log(drafting time / recorded time); None: not measured.
    """

    factors: dict[int, float] = field(default_factory=dict)
    num_seen: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    num_learnt: int = 0
    rest_ms: list[float | None] = field(default_factory=lambda: [None, None])
    draft: float | None = None
    table: tuple[float, ...] = ()
    num_left: int = 0

    def factor(self, nodes: int) -> float:
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

    The recorded costs are of one sequence: a step of b sequences with n nodes each is assumed to cost as much as one
    of b * n nodes, until such steps were measured. A step's time is the recorded one times the machine's factor, which
    all shapes share and which moves quickly, times the factor of its shape, which moves slowly. A shape
    that is no longer used is forgotten, so that it is tried again: some slow steps may be why.

    Args:
        target: recorded costs of scoring, by nodes; not empty.
        draft: recorded costs of a draft run, by nodes; None: drafting runs no graph.
        max_drafts: most draft tokens of a sequence in a step.
    """

    def __init__(self, target: StepCosts, draft: StepCosts | None, max_drafts: int) -> None:
        self.target, self.draft, self.max_drafts = target, draft, max_drafts
        self._machine: float | None = None
        self._num_seen = 0
        self._batches: dict[int, _Batch] = {}
        self._had_drafts = True

    def scores(self, num_slots: int) -> tuple[float, ...]:
        """Returns the milliseconds of a step without its drafting, for 0 to `max_drafts` draft tokens per sequence."""
        batch = self._batches.get(num_slots) or self._batches.setdefault(num_slots, _Batch())
        if batch.num_left <= 0:
            batch.forget()
            machine = self._machine or 0.0
            rests = [rest if rest is not None else batch.rest_ms[1 - i] or 0.0 for i, rest in enumerate(batch.rest_ms)]
            batch.table = tuple(
                self.target.ms(num_slots * (1 + num)) * math.exp(machine + batch.factor(1 + num)) + rests[num > 0]
                for num in range(self.max_drafts + 1)
            )
            batch.num_left = KEPT_STEPS
        return batch.table

    def draft_ms(self, num_slots: int, num_nodes: int) -> float:
        """Returns the milliseconds of a draft run."""
        if self.draft is None:
            return 0.0
        batch = self._batches.get(num_slots)
        factor = self._machine or 0.0 if batch is None or batch.draft is None else batch.draft
        return self.draft.ms(num_nodes) * math.exp(factor)

    def observe(self, num_slots: int, num_nodes: int, recorded_draft_ms: float, times: StepTimes) -> None:
        """Corrects the costs with the times of a step.

        Args:
            num_nodes: nodes that the target scored per sequence, root and padding included.
            recorded_draft_ms: recorded cost of its draft runs; 0: nothing was drafted.
        """
        batch = self._batches.get(num_slots) or self._batches.setdefault(num_slots, _Batch())
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
            batch.draft = seen if batch.draft is None else batch.draft + MACHINE_WEIGHT * _bounded(seen - batch.draft)

    def _learn_score(self, batch: _Batch, num_nodes: int, seen: float) -> None:
        self._num_seen += 1
        if self._machine is None:
            self._machine = seen
        if num_nodes not in batch.factors:
            batch.num_left = 0
        known = batch.factor(num_nodes)
        surprise = _bounded(seen - self._machine - known)
        self._machine += max(MACHINE_WEIGHT, 1 / self._num_seen) * surprise
        batch.factors[num_nodes] = known + max(SHAPE_WEIGHT, 1 / batch.num_seen[num_nodes]) * surprise
        batch.num_learnt += 1
        batch.last[num_nodes] = batch.num_learnt


def _bounded(surprise: float) -> float:
    return min(max(surprise, -MAX_SURPRISE), MAX_SURPRISE)
