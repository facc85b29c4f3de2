# SPDX-License-Identifier: Apache-2.0
"""Says of each step what was drafted, why, and what was accepted: for `generate --explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speccompile.core.protocols import StepTimes
from speccompile.core.tree import tree_lines
from speccompile.drafting.budget import Weighs
from speccompile.runtime.comparison import PLAIN
from speccompile.runtime.control import Planner
from speccompile.runtime.draft_report import EXPECTED, NOT_COMPARED, DraftReport, report_from_planner
from speccompile.runtime.requests import StepOutput
from speccompile.runtime.sequences import TokenSequence


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

    def observe(self, sequences: Sequence[TokenSequence], steps: Sequence[StepOutput], times: StepTimes) -> None:
        self._planner.observe(sequences, steps, times)

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
