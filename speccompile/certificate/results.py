# SPDX-License-Identifier: Apache-2.0
"""Results of checks, and the certificate that they make up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from speccompile.bundle.bundle import Bundle
from speccompile.bundle.format import digest_from_manifest
from speccompile.bundle.publish import FAILED, INCOMPLETE, NOT_RUN, PASSED, VERSION

Status = Literal["passed", "failed", "not run"]
LEAST_DRAFTS = 100  # draft tokens that each run of a check scores; fewer show little


@dataclass(frozen=True)
class DraftCounts:
    """What the runs of a check scored whose drafts are compared."""

    by_run: Mapping[str, tuple[int, int]]  # (draft tokens, steps) by the run's name

    @property
    def short(self) -> list[str]:
        rows = self.by_run.items()
        return [f"{run}: {num} draft tokens in {steps} steps" for run, (num, steps) in rows if num < LEAST_DRAFTS]

    def json_from_counts(self) -> dict[str, Any]:
        """Returns the counts of all runs together and the least that each of them needs, JSON-ready."""
        nums, steps = zip(*self.by_run.values(), strict=True) if self.by_run else ((), ())
        least = {"least_draft_tokens_of_a_run": LEAST_DRAFTS, "has_enough_drafts": not self.short}
        return {"num_draft_tokens": sum(nums), "num_draft_steps": sum(steps), **least}


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    status: Status
    summary: str  # one sentence with its main figures, or why it was not run
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    drafts: DraftCounts | None = None  # draft tokens that its runs scored, and steps; None: no runs

    def json_from_check(self) -> dict[str, Any]:
        seconds = round(self.seconds, 2)
        counts = self.drafts.json_from_counts() if self.drafts is not None else {}
        head = {"name": self.name, "status": self.status, "summary": self.summary, "seconds": seconds}
        return {**head, **counts, **self.facts}


def check_of(
    name: str, is_right: bool, summary: str, facts: Mapping[str, Any], drafts: DraftCounts | None = None
) -> Check:
    """Returns a check that passed where `is_right`, and failed otherwise; without enough drafts nothing has passed."""
    if is_right and drafts is not None and (short := drafts.short):
        least = f"at least {LEAST_DRAFTS} show something (give more prompts or tokens)"
        return Check(name, "not run", f"too few drafts, {'; '.join(short)}: {least}; {summary}", facts, drafts=drafts)
    return Check(name, "passed" if is_right else "failed", summary, facts, drafts=drafts)


def not_run(name: str, why: str) -> Check:
    return Check(name, "not run", why)


def verdict_of(checks: Iterable[Check]) -> str:
    """Returns `failed` where one check failed, else `incomplete` where one was not run, else `passed`."""
    found = {check.status for check in checks}
    return FAILED if FAILED in found else INCOMPLETE if NOT_RUN in found else PASSED


def certificate_from_checks(bundle: Bundle, checks: Iterable[Check], about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the certificate, JSON-ready."""
    rows = list(checks)
    found: dict[str, Any] = {
        "certificate_version": VERSION,
        **about,
        "bundle": {
            "digest": bundle.manifest["digest"],
            "files": {name: record["sha256"] for name, record in bundle.manifest["files"].items()},
        },
        "verdict": verdict_of(rows),
        "checks": [check.json_from_check() for check in rows],
    }
    found = json.loads(json.dumps(found), parse_constant=lambda name: None)  # JSON has no Infinity
    found["digest"] = digest_from_manifest(found)
    return found


__all__ = [
    "FAILED",
    "NOT_RUN",
    "PASSED",
    "Check",
    "DraftCounts",
    "Status",
    "certificate_from_checks",
    "check_of",
    "not_run",
    "verdict_of",
]
