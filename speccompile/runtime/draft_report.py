# SPDX-License-Identifier: Apache-2.0
"""Says whether drafts are on and why: in a sentence wherever a user looks, by steps for `generate --explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speccompile.core.protocols import StepTimes
from speccompile.core.tree import tree_lines
from speccompile.drafting.budget import Weighs
from speccompile.runtime.control import PLAIN, Planner
from speccompile.runtime.requests import StepOutput
from speccompile.runtime.sequences import TokenSequence

ASKED, MEASURED, EXPECTED, NOT_COMPARED, FIXED, NOTHING = (
    "asked for",
    "measured",
    "expected",
    "not compared yet",
    "fixed by the recipe",
    "nothing drafted",
)


@dataclass(frozen=True)
class DraftReport:
    """Whether drafts are on, and why."""

    is_on: bool
    reason: str  # one of the few words above, for a metric's label
    cost: float | None = None  # of a draft token, drafting and scoring, in plain steps; None: not known
    accepted: float | None = None  # share of draft tokens that are accepted; None: not known
    asked: str | None = None  # the request's or the service's `speculation` where that is the reason

    @property
    def sentence(self) -> str:
        """E.g. "drafts off: a draft token costs 0.6 of a step here, 31 % are accepted"."""
        return f"drafts {'on' if self.is_on else 'off'}: {self._why()}"

    def _why(self) -> str:
        cost, accepted = self.cost, self.accepted
        share = "" if accepted is None else f", {100 * accepted:.0f} % are accepted"
        if self.reason == ASKED:
            return f"speculation is {self.asked}{share}"
        if cost is not None:
            verb = "is expected to cost" if self.reason == EXPECTED else "costs"
            return f"a draft token {verb} {_text(cost)} of a step here{share}"
        if self.reason == FIXED:
            return f"their number is fixed{share}"
        if self.reason == NOT_COMPARED:
            return "not yet compared with plain decoding"
        return "the method drafted nothing" if self.reason == NOTHING else "no draft is expected to be worth its time"

    def json_from_report(self) -> dict[str, Any]:
        numbers = {"draft_token_cost": self.cost, "accepted_share": self.accepted}
        return {"is_on": self.is_on, "sentence": self.sentence, "reason": self.reason, **numbers}


def report_from_planner(
    planner: Planner | None, num_draft_tokens: int, num_accepted: int, asked: str = "auto"
) -> DraftReport:
    """Returns the report of the batch that decoded last. `planner`: decides whether to draft; None: nothing does."""
    share = num_accepted / num_draft_tokens if num_draft_tokens else None
    if asked != "auto":
        return DraftReport(asked == "on", ASKED, accepted=share if asked == "on" else None, asked=asked)
    decision = None if planner is None else planner.latest()
    if decision is None:
        return DraftReport(share is not None, FIXED if share is not None else NOTHING, accepted=share)
    if not decision or not decision["num_compared"]:
        return DraftReport(True, NOT_COMPARED)
    cost, accepted = decision["draft_token_cost"], decision["accepted_share"]
    is_measured = cost is not None and not decision["is_expected"]
    return DraftReport(decision["drafts"], MEASURED if is_measured else EXPECTED, cost, accepted)


def _text(cost: float) -> str:
    return "less than 0.01" if cost < 0.01 else f"{cost:.2g}"


class ExplainedPlanner:
    """A planner that remembers why each step drafts: `planner` decides, by what the budget of `proposer` expects."""

    def __init__(self, planner: Planner, proposer: object) -> None:
        self._planner, self._proposer = planner, proposer
        self._limit: int | None = None
        self._report: DraftReport | None = None  # of the step that was planned; None: none since the last `reason`

    def plan(self, sequences: Sequence[TokenSequence]) -> int | None:
        self._limit = self._planner.plan(sequences)
        self._report = report_from_planner(self._planner, 0, 0)
        return self._limit

    def observe(self, sequences: Sequence[TokenSequence], steps: Sequence[StepOutput], times: StepTimes) -> bool:
        return self._planner.observe(sequences, steps, times)

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        self._planner.read(num_tokens, draft_s)

    def expects_drafts(self, num_active: int) -> bool:
        return self._planner.expects_drafts(num_active)

    def decisions(self) -> dict[str, Any]:
        return self._planner.decisions()

    def latest(self) -> dict[str, Any] | None:
        return self._planner.latest()

    def reason(self, step: StepOutput) -> str:
        """Returns why the step that was planned last drafted as much as it did."""
        report, self._report = self._report, None
        if report is None:
            return "drafts are drawn: recorded costs decide, not the clock"
        if self._limit == PLAIN:
            if report.reason == NOT_COMPARED:
                return "plain steps are measured before drafts"
            return f"a plain step for comparison ({report.sentence})" if report.is_on else report.sentence
        if step.num_draft_tokens or self._limit is not None:
            return report.sentence if report.is_on else f"a step with drafts for comparison ({report.sentence})"
        outlook = self._proposer.outlook if isinstance(self._proposer, Weighs) else None
        if outlook is None:
            return "the method drafted nothing"
        return DraftReport(False, EXPECTED, outlook.cost, outlook.accepted).sentence


def explain_step(number: int, step: StepOutput, reason: str, next_text: str) -> str:
    """Returns what a step did and why, with its tree where it has drafts.

    Args:
        number: 1 or more; the first step has no drafts where its token comes with the prompt.
        next_text: of the recovered, bonus or plain token after the accepted ones.
    """
    if not step.num_draft_tokens or step.trace is None:
        why = "with the prompt" if number == 1 else reason
        return f"step {number}: {next_text}; {why}"
    trace = step.trace
    names = [repr(text) for text in trace.texts] or list(map(str, trace.tokens))
    kind = "bonus" if step.is_bonus else "recovered"
    head = f"step {number}: {step.num_draft_tokens} draft tokens, {step.num_accepted} accepted; {reason}"
    lines = [*tree_lines(names, trace.parents, trace.path), f"then {next_text} ({kind})"]
    return "\n".join([head, *(f"  {line}" for line in lines)])
