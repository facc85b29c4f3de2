# SPDX-License-Identifier: Apache-2.0
"""Says whether drafts are on and why, in one sentence for everywhere that a user looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from speccompile.runtime.control import Planner

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
