# SPDX-License-Identifier: Apache-2.0
"""certificate.html: one page about the checks of a bundle, what they found first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speccompile.bundle.report import page_from_parts, table, text_from_number, text_of

_IN_SUMMARY = ("name", "status", "summary", "seconds", "num_draft_tokens", "num_draft_steps")
CHECKS = {
    "tokenizer": "tokenizer",
    "greedy": "greedy texts with drafts",
    "reference": "texts beside transformers",
    "faults": "texts with planted drafts",
    "sampled": "sampled texts",
    "grammar": "sampled texts within a grammar",
    "caches": "the target's caches",
    "distance": "logits beside transformers",
    "acceptance": "acceptance of drafts",
}
WORDS = {
    "kl": "KL divergence, nats",
    "top1": "same likeliest token, share",
    "perplexity_change": "change of the perplexity, share",
    "perplexity_error": "its standard error",
    "p_value": "p",
    "chi_square": "chi-square",
    "num_equal": "equal texts",
    "num_cells": "cells of the test",
    "num_draft_tokens": "draft tokens scored",
    "num_draft_steps": "steps with them",
    "num_entries_differing": "entries that differ",
    "mean_acceptance_length": "tokens a step",
    "noticed_effect": "effect that is noticed (w)",
    "noticed_total_variation": "total variation that is noticed",
    "least_draft_tokens_of_a_run": "draft tokens that a run needs",
    "row_deviation": "largest difference of a row, standard deviations",
    "logit_deviation": "largest difference of a logit, standard deviations",
    "chain_deviation": "largest difference of a chain's logits from single steps, standard deviations",
    "is_exact": "float32 with the checkpoint's weights",
    "own": "the method's drafts",
    "loop": "the plain loop in torch",
}


def html_from_certificate(certificate: Mapping[str, Any]) -> str:
    """Returns the page of a certificate."""
    title, checks = f"Certificate: {certificate['verdict']}", certificate["checks"]
    about = f"speccompile {certificate['speccompile_version']}, {certificate['created_at']}"
    digest, counts = certificate["bundle"]["digest"], [check["status"] for check in checks]
    told = ", ".join(
        f"{counts.count(status)} {status}" for status in ("passed", "failed", "not run") if status in counts
    )
    head = ("check", "result", "what was seen", "draft tokens scored", "seconds")
    parts = [
        f"<h1>{text_of(title)}</h1><p class=sub>{text_of(about)}, bundle {text_of(digest[:16])}</p>",
        f"<p>{len(checks)} checks: {text_of(told)}.</p>",
        table(head, [_row(check) for check in checks]),
    ]
    for check in checks:
        parts += _facts(check)
    parts += ["<h2>Versions</h2>", table(("package", "version"), certificate["versions"].items())]
    files = sorted(certificate["bundle"]["files"].items())
    parts += ["<h2>Files</h2>", table(("file", "sha256"), [(name, digest[:16]) for name, digest in files])]
    return page_from_parts(title, parts)


def _row(check: Mapping[str, Any]) -> tuple[object, ...]:
    drafts = "none needed"
    if "num_draft_tokens" in check:
        drafts = f"{check['num_draft_tokens']} in {check['num_draft_steps']} steps"
    return CHECKS.get(check["name"], check["name"]), check["status"], check["summary"], drafts, float(check["seconds"])


def _facts(check: Mapping[str, Any]) -> list[str]:
    """Returns a section with the facts of a check; lists of records become tables."""
    facts = {key: value for key, value in check.items() if key not in _IN_SUMMARY}
    tables, rows = list[str](), list[tuple[str, str]]()
    for key, value in facts.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            columns = [
                name for name in dict.fromkeys(n for row in value for n in row) if any(row.get(name) for row in value)
            ]
            tables.append(
                table(
                    list(map(words_from_key, columns)), [[text_from_fact(r.get(c, "")) for c in columns] for r in value]
                )
            )
        elif isinstance(value, Mapping):
            rows += [(f"{words_from_key(key)}: {words_from_key(k)}", text_from_fact(v)) for k, v in value.items()]
        else:
            rows.append((words_from_key(key), text_from_fact(value)))
    if not (tables or rows):
        return []
    heading = f"<h2>{text_of(CHECKS.get(check['name'], check['name'])).capitalize()}</h2>"
    return [heading, *([table(("", ""), rows)] if rows else []), *tables]


def words_from_key(key: str) -> str:
    known = WORDS.get(key)
    return known if known is not None else key.removeprefix("num_").removeprefix("is_").replace("_", " ")


def text_from_fact(value: object) -> str:
    """Returns a fact as text: numbers with three digits, lists and records without brackets."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return text_from_number(value)
    if isinstance(value, Mapping):
        return "; ".join(f"{words_from_key(str(k))} {text_from_fact(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text_from_fact, value))
    return str(value)
