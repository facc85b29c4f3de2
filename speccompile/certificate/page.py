# SPDX-License-Identifier: Apache-2.0
"""certificate.html: one page about the checks of a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speccompile.bundling.report import page_from_parts, table, text_of

_LEFT_OUT = ("name", "status", "summary", "seconds")


def html_from_certificate(certificate: Mapping[str, Any]) -> str:
    """Returns the page of a certificate."""
    title = f"Certificate: {certificate['verdict']}"
    about = f"speccompile {certificate['speccompile_version']}, {certificate['created_at']}"
    digest = certificate["bundle"]["digest"]
    parts = [
        f"<h1>{text_of(title)}</h1><p class=sub>{text_of(about)}, bundle {text_of(digest[:16])}</p>",
        table(
            ("check", "result", "seconds", "what was seen"),
            [(c["name"], c["status"], f"{c['seconds']:.1f}", c["summary"]) for c in certificate["checks"]],
        ),
    ]
    for check in certificate["checks"]:
        parts += _facts(check)
    parts += ["<h2>Versions</h2>", table(("package", "version"), certificate["versions"].items())]
    files = sorted(certificate["bundle"]["files"].items())
    parts += ["<h2>Files</h2>", table(("file", "sha256"), [(name, digest[:16]) for name, digest in files])]
    return page_from_parts(title, parts)


def _facts(check: Mapping[str, Any]) -> list[str]:
    """Returns a section with the facts of a check; lists of records become tables."""
    facts = {key: value for key, value in check.items() if key not in _LEFT_OUT}
    if not facts:
        return []
    parts, rows = [f"<h2>{text_of(check['name'])}</h2>"], []
    for key, value in facts.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            columns = list(dict.fromkeys(name for row in value for name in row))
            cells = [[row.get(name, "") for name in columns] for row in value]
            parts.append(table(columns, cells))
        else:
            rows.append((key, value))
    return [parts[0], *([table(("", ""), rows)] if rows else []), *parts[1:]]
