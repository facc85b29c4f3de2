# SPDX-License-Identifier: Apache-2.0
"""Results of checks, and the certificate that they make up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from speccompile.runtime.bundle import Bundle, digest_from_manifest
from speccompile.runtime.certificates import FAILED, NOT_RUN, PASSED, VERSION

Status = Literal["passed", "failed", "not run"]


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Args:
        name: of the check, as `greedy`.
        status: whether it passed.
        summary: one sentence with its main figures, or why it was not run.
        facts: all that was seen, JSON-ready.
        seconds: that it took.
    """

    name: str
    status: Status
    summary: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def json_from_check(self) -> dict[str, Any]:
        """Returns a JSON-ready dict."""
        seconds = round(self.seconds, 2)
        return {"name": self.name, "status": self.status, "summary": self.summary, "seconds": seconds, **self.facts}


def check_of(name: str, is_right: bool, summary: str, facts: Mapping[str, Any]) -> Check:
    """Returns a check that passed where `is_right`, and failed otherwise."""
    return Check(name, "passed" if is_right else "failed", summary, facts)


def not_run(name: str, why: str) -> Check:
    """Returns a check that could not be run, with the reason."""
    return Check(name, "not run", why)


def verdict_of(checks: Iterable[Check]) -> str:
    """Returns `failed` where one check failed, else `passed`, also where some were not run."""
    return FAILED if any(check.status == FAILED for check in checks) else PASSED


def certificate_from_checks(bundle: Bundle, checks: Iterable[Check], about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the certificate, JSON-ready.

    Args:
        bundle: that was checked; the digests of its files are in the certificate.
        checks: their results.
        about: versions, machine, time.
    """
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
    found["digest"] = digest_from_manifest(found)
    return found


__all__ = [
    "FAILED",
    "NOT_RUN",
    "PASSED",
    "Check",
    "Status",
    "certificate_from_checks",
    "check_of",
    "not_run",
    "verdict_of",
]
