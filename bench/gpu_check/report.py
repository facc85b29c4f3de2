# SPDX-License-Identifier: Apache-2.0
"""What sections return, and the page that is made of it.

A section's result is a dict, JSON-ready:

    status: passed, failed or not run
    reason: why it failed or was not run; may be empty
    rows: list of {"what", "got", "expected", "ok"}; ok is true, false, or None where nothing was demanded
    anything else is kept in report.json as it is
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = "report.md"
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


def row(what: str, got: object, expected: object = "", ok: bool | None = None) -> dict[str, Any]:
    """Returns one line of the table."""
    return {"what": what, "got": got, "expected": expected, "ok": ok}


def not_run(reason: str) -> dict[str, Any]:
    """Returns the result of a section that cannot run here."""
    return {"status": NOT_RUN, "reason": reason, "rows": []}


def result(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Returns the result of a section that ran: failed when a row is wrong, or when there is none."""
    wrong = [r["what"] for r in rows if r["ok"] is False]
    status = FAILED if wrong or not rows else PASSED
    reason = f"wrong: {'; '.join(wrong)}" if wrong else ("" if rows else "nothing was measured")
    return {"status": status, "reason": reason, "rows": rows, **more}


def completed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a section's result with defaults for what it left out."""
    made = result([{"what": "?", "got": "", "expected": "", "ok": None, **r} for r in raw.get("rows", [])])
    return {**made, **{k: v for k, v in raw.items() if k != "rows"}}


def page_from_results(facts: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the report as Markdown.

    Args:
        facts: what was run on: hardware, versions, date.
        results: by section.
    """
    lines = ["# gpu-check", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| part | status | reason |", "|---|---|---|"]
    lines += [f"| {name} | {r['status']} | {_cell(r.get('reason', ''))} |" for name, r in results.items()]
    lines += ["", "| part | what | got | expected | |", "|---|---|---|---|---|"]
    marks = {True: "ok", False: "WRONG", None: ""}
    for name, held in results.items():
        for r in held["rows"]:
            cells = (name, r["what"], r["got"], r["expected"], marks[r["ok"]])
            lines.append("| " + " | ".join(_cell(c) for c in cells) + " |")
    return "\n".join([*lines, ""])


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "/").split())[:300]


def write_report(work: Path, facts: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the report into `work`, and all there is to the JSON beside it."""
    (work / PAGE).write_text(page_from_results(facts, results), encoding="utf-8")
    record = {"facts": dict(facts), "results": dict(results)}
    (work / PAGE).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
