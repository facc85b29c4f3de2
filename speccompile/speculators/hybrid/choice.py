# SPDX-License-Identifier: Apache-2.0
"""Which drafter runs in a step: the one whose step is expected to bring the most tokens per millisecond.

Drafters without a graph cost next to nothing, draft in every step, and say how many accepted drafts they expect. One
with a graph expects as many in a sequence as it had in recent steps; its drafts count where that is more:

    tokens = sum over sequences of 1 + max(expected of the others, expected of the drafter)
    time   = scoring of as many drafts + its runs + reading of the tokens that it missed / `READ_OVER`

The drafter with the most tokens / time runs, or none if the others alone have more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from speccompile.core.jobs import StepCosts
from speccompile.drafting.budget import FORGOTTEN_STEPS, corrected

READ_OVER = 4  # steps that share the time in which a drafter reads what it missed: it is likely to run again


@dataclass(frozen=True)
class Offer:
    """What a drafter with graphs offers for a step."""

    expected: Sequence[float]  # by sequence, accepted drafts; 0 where it cannot draft
    num_drafts: int
    ms: float


def choose(known: Sequence[float], num_known: int, offers: Sequence[Offer], scores: Sequence[float]) -> int:
    """Returns the index of the offer that is taken; -1: none.

    Args:
        known: by sequence, accepted drafts that are expected of the drafts that are there already.
        scores: milliseconds of a step without its drafting, by drafts; empty: unknown, the most tokens are taken.
    """

    def ms_of(num_drafts: int, drafting_ms: float) -> float:
        return scores[min(num_drafts, len(scores) - 1)] + drafting_ms if scores else 1.0

    next_tokens = len(known) if scores else 0
    best, most_tokens, least_ms = -1, next_tokens + sum(known), ms_of(num_known, 0.0)
    for index, offer in enumerate(offers):
        pairs = list(zip(known, offer.expected, strict=True))
        if all(more <= less for less, more in pairs):
            continue
        tokens = next_tokens + sum(max(pair) for pair in pairs)
        # Sequences that keep the drafts they have are scored as deep as before.
        keeps = any(more <= less for less, more in pairs)
        ms = ms_of(max(offer.num_drafts, num_known if keeps else 0), offer.ms)
        if tokens * least_ms > most_tokens * ms:
            best, most_tokens, least_ms = index, tokens, ms
    return best


@dataclass(slots=True)
class _Factor:  # of one number of sequences
    log: float = 0.0  # of measured time / recorded time
    num_seen: int = 0  # the first, with allocation, does not count
    num_unused: int = 0  # steps since it ran


class DrafterCosts:
    """Milliseconds of a drafter: recorded times of its runs, corrected by measured ones; a run has 1 or more drafts."""

    def __init__(self, graphs: Sequence[StepCosts], drafts_per_run: int = 1, *, has_caches: bool = True) -> None:
        self._graphs, self._per_run = tuple(graphs), max(drafts_per_run, 1)
        self._has_caches = has_caches  # of its own, so that it reads tokens that it missed
        self._factors: dict[int, _Factor] = {}  # by sequences
        self.num_drafts = 1.0  # of a sequence in recent steps
        self.is_known = all(cost.ms_by_nodes for cost in self._graphs)

    def recorded_ms(self, num_slots: int, expected: float, num_missed: int) -> tuple[float, float]:
        """Returns the recorded milliseconds of drafting, and of reading."""
        run = sum(cost.ms(num_slots) for cost in self._graphs)
        num_read = num_missed if self._has_caches else 0
        reading = sum(cost.ms(num_slots * (1 + num_read)) for cost in self._graphs) - run
        return run * math.ceil((1 + expected) / self._per_run), reading

    def ms(self, num_slots: int, expected: float, num_missed: int) -> float:
        """Returns the milliseconds that count for a step; see `recorded_ms`."""
        drafting, reading = self.recorded_ms(num_slots, expected, num_missed)
        at = self._factors.get(num_slots)
        return (math.exp(at.log) if at is not None else 1.0) * (drafting + reading / READ_OVER)

    def observe(self, num_slots: int, expected: float, num_missed: int, seconds: float) -> None:
        """Corrects the costs with the time of a step in which it drafted; see `recorded_ms`."""
        at = self._factors.setdefault(num_slots, _Factor())
        at.num_seen, at.num_unused = at.num_seen + 1, 0
        recorded = sum(self.recorded_ms(num_slots, expected, num_missed))
        if at.num_seen > 1 and recorded > 0 and seconds > 0:
            seen = math.log(seconds * 1e3 / recorded)
            at.log = seen if at.num_seen == 2 else corrected(at.log, seen)

    def rest(self, num_slots: int) -> None:
        """Counts a step without it: after `FORGOTTEN_STEPS` it costs what was recorded, so that it is tried again."""
        at = self._factors.get(num_slots)
        if at is not None:
            at.num_unused += 1
            if at.num_unused == FORGOTTEN_STEPS:
                at.log, at.num_seen = 0.0, 1
