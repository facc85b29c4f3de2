# SPDX-License-Identifier: Apache-2.0
"""Findings of the doctor: each has the four parts of an error, and a severity. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from speccompile.errors import CheckpointError

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One fault, or possible fault, of a checkpoint."""

    severity: Severity  # an error stops a build or a conversion; a warning does not
    check: str
    where: str
    got: str
    expected: str
    todo: str

    def json_from_finding(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in ("severity", "check", "where", "got", "expected", "todo")}

    def text(self) -> str:
        return f"{self.severity}  {self.check}  {self.where}: got {self.got}; expected {self.expected}. {self.todo}"


@dataclass(frozen=True)
class Report:
    """All findings in one checkpoint."""

    folder: str
    format: str
    label: str
    method: str  # the recipe's method that takes it, "" where there is none
    target: str
    sizes: dict[str, int]
    num_tensors: int
    num_params: int
    has_read_values: bool  # whether weights were read, or only headers
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def exit_code(self) -> int:
        """Returns 0 without errors, else that of `CheckpointError`."""
        return CheckpointError.exit_code if self.errors else 0

    def json_from_report(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        plain = ("folder", "format", "label", "method", "target", "sizes", "num_tensors", "num_params")
        return {
            **{name: getattr(self, name) for name in plain},
            "has_read_values": self.has_read_values,
            "num_errors": len(self.errors),
            "num_warnings": len(self.findings) - len(self.errors),
            "exit_code": self.exit_code,
            "findings": [f.json_from_finding() for f in self.findings],
        }


def raise_first(report: Report) -> None:
    """Raises the first error; does nothing when there is none.

    Raises:
        CheckpointError: the first error, with a hint at the command that lists all.
    """
    if report.errors:
        first, others = report.errors[0], len(report.errors) - 1
        more = f" ({others} more)" if others else ""
        hint = f"`speccompile doctor {report.folder}` lists every finding{more}."
        raise CheckpointError(first.where, first.got, first.expected, f"{first.todo} {hint}")
