# SPDX-License-Identifier: Apache-2.0
"""Which conventions a checkpoint was trained with: the readings of its weights compared by acceptance. No torch.

A convention is a choice that no shape shows: a wrong one gives no error, only fewer accepted drafts. A method declares
its own and drafts under any reading of them (`Format.probe` names its `Probe`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from speccompile.doctor.findings import Finding

if TYPE_CHECKING:
    from speccompile.training_contract import TrainingBatch

CHECK = "probe"  # of the findings
GROUP_STARTS = 16  # neighbouring starts draft nearly the same tokens: they count as one draw
MAX_ROUNDS = 3  # conventions that may be wrong at once
_NUM_ERRORS = 3.0  # standard errors that a difference must exceed
_LEAST_GAIN = 0.05  # tokens a step, below which a difference is of no use
_LEAST_ACCEPTED = 0.1  # of first drafts; less is what untrained weights reach by repeating frequent tokens

Verdict = Literal["as stated", "otherwise", "undecided"]
Reading = Mapping[str, Any]  # a value of each convention, by name


@dataclass(frozen=True)
class Convention:
    """A choice that the weights cannot show."""

    name: str
    where: str
    stated: Any
    others: tuple[Any, ...]  # further values that its author could have meant
    todo: str  # what the user can do, with "{value}" for the value that the weights mean


class Probe(Protocol):
    """A method's drafter in torch, under any reading. Made of (case, the target's `TrainingParts`)."""

    conventions: tuple[Convention, ...]  # of its checkpoints
    max_drafts: int  # the longest chain

    def draft(self, reading: Reading, text: TrainingBatch, roots: Any, num: int) -> Any:
        """Returns greedy drafts [starts, num] int64, of which each follows the text's own tokens.

        Args:
            text: one sequence with the target's outputs: `hidden` and `layers` of all decoder layers.
            roots: [starts] int64, positions of the roots; the target has read what comes before them.
            num: drafts of a chain, at most `max_drafts`.
        """
        ...


@dataclass(frozen=True)
class Measured:
    """Acceptance of one reading."""

    changed: dict[str, Any]
    num_starts: int
    mean_acceptance_length: float  # 1 + accepted / starts
    by_position: tuple[float, ...]  # accepted / tried by position; a draft is tried where all before it were accepted
    gain: float
    standard_error: float | None  # None: all chains are neighbours, so it is not known


@dataclass(frozen=True)
class ProbeReport:
    """What the readings show."""

    verdict: Verdict  # "as stated": no other reading is better, and some are worse; "otherwise": `meant` is better
    reason: str  # why it is undecided; else empty
    meant: dict[str, Any]  # values that the weights mean in the place of those stated
    alike: dict[str, list[Any]]  # further values by convention, of which these texts do not show that they are worse
    num_prompts: int
    num_drafts: int
    readings: tuple[Measured, ...]
    findings: tuple[Finding, ...]

    def json_from_report(self) -> dict[str, Any]:
        return {**asdict(self), "findings": [f.json_from_finding() for f in self.findings]}


# Of each reading: accepted drafts of chains [starts] int64 of each text; the same texts and starts for all.
Measure = Callable[[Sequence[Reading]], list[list[np.ndarray]]]


def accepted_drafts(drafts: np.ndarray, text: np.ndarray, roots: np.ndarray) -> np.ndarray:
    """Returns how many drafts of each chain are the text's tokens, up to the first that is not, [starts] int64.

    `drafts` are [starts, num], `text` [nodes] with `num` tokens after each of `roots` [starts], all int64.
    """
    wanted = text[roots[:, None] + 1 + np.arange(drafts.shape[1])]
    counts: np.ndarray = np.cumprod(drafts == wanted, 1).sum(1)
    return counts


def difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> tuple[float, float]:
    """Returns the mean of `one - other` (accepted [starts] by text) and its standard error, by groups of starts."""
    apart = [np.subtract(a, b, dtype=np.float64) for a, b in zip(one, other, strict=True)]
    num, mean = sum(map(len, apart)), float(np.concatenate(apart).mean())
    sums = [(d[i : i + GROUP_STARTS] - mean).sum() for d in apart for i in range(0, len(d), GROUP_STARTS)]
    if len(sums) < 2:
        return mean, math.inf
    return mean, math.sqrt(len(sums) / (len(sums) - 1) * sum(x**2 for x in sums)) / num


def compare_readings(conventions: Sequence[Convention], measure: Measure, num_drafts: int) -> ProbeReport:
    """Finds the reading that the weights mean: the best change of one convention, then the next, while it is better."""
    stated: dict[str, Any] = {c.name: c.stated for c in conventions}
    meant: dict[str, Any] = {}
    tried: dict[str, Measured] = {}
    while True:
        changes = [(c.name, value) for c in conventions if c.name not in meant for value in c.others]
        changed = [{}, meant, *({**meant, name: value} for name, value in changes)]
        counts = measure([{**stated, **change} for change in changed])
        for change, count in zip(changed, counts, strict=True):
            tried.setdefault(repr(change), _measured(change, count, counts[0], num_drafts))
        own, others = counts[1], counts[2:]
        best = _best(own, others)
        if best is None or len(meant) == MAX_ROUNDS:
            break
        # Of the values of that convention that the texts cannot tell from the best, the first that is declared.
        name = changes[best][0]
        equals = [
            i for i, change in enumerate(changes) if change[0] == name and not _is_better(others[best], others[i])
        ]
        meant = {**meant, name: changes[equals[0]][1]}
    is_worse = [_is_better(own, count) for count in others]
    alike: dict[str, list[Any]] = {}
    for name, value in itertools.compress(changes, [not worse for worse in is_worse]):
        alike.setdefault(name, []).append(value)
    share, reason = float((np.concatenate(own) >= 1).mean()), ""
    if share < _LEAST_ACCEPTED:
        reason = f"at best {share:.1%} of first drafts are accepted: untrained weights, or another target's"
    elif not meant and not any(is_worse):
        reason = "no reading is better or worse than another by more than chance"
    found = {c.name: c for c in conventions}
    verdict: Verdict = "undecided" if reason else "otherwise" if meant else "as stated"
    if reason:
        findings: tuple[Finding, ...] = (_undecided(conventions, reason),)
    else:
        findings = tuple(_other(found[name], value, tried[repr(meant)]) for name, value in meant.items())
    meant = {} if reason else meant
    return ProbeReport(verdict, reason, meant, alike, len(own), num_drafts, tuple(tried.values()), findings)


def _best(own: Sequence[np.ndarray], others: Sequence[Sequence[np.ndarray]]) -> int | None:
    gains = [(difference(count, own)[0], -i) for i, count in enumerate(others) if _is_better(count, own)]
    return -max(gains)[1] if gains else None


def _is_better(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    gain, error = difference(one, other)
    return gain > max(_NUM_ERRORS * error, _LEAST_GAIN)


def _measured(
    changed: dict[str, Any], count: Sequence[np.ndarray], stated: Sequence[np.ndarray], num_drafts: int
) -> Measured:
    every = np.concatenate(count)
    tried = [int((every >= i).sum()) for i in range(num_drafts + 1)]
    shares = tuple(round(kept / num, 4) if num else 0.0 for num, kept in itertools.pairwise(tried))
    gain, error = difference(count, stated)
    length = 1 + float(every.mean())
    known = round(error, 4) if math.isfinite(error) else None
    return Measured(changed, len(every), round(length, 4), shares, round(gain, 4), known)


def _undecided(conventions: Sequence[Convention], reason: str) -> Finding:
    where = conventions[0].where.partition(" (")[0]
    todo = "Give prompts of its kind with --prompts, more of them, or the target that it was trained for."
    return Finding("warning", CHECK, where, reason, "drafts that some reading makes better", todo)


def _other(convention: Convention, value: Any, best: Measured) -> Finding:
    before = best.mean_acceptance_length - best.gain
    got = f"{convention.name} {text_of(convention.stated)}, mean acceptance length {before:.2f}"
    expected = f"{text_of(value)}, with which it is {best.mean_acceptance_length:.2f}"
    todo = convention.todo.replace("{value}", text_of(value))
    return Finding("error", CHECK, convention.where, got, expected, todo)


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
