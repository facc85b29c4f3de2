# SPDX-License-Identifier: Apache-2.0
"""Runs the checks of a bundle, and writes the certificate into it."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speccompile.bundle.bundle import Bundle
from speccompile.bundle.format import CERTIFICATE, CERTIFICATE_PAGE, versions_from_environment, write_json
from speccompile.certificate.acceptance import check_acceptance
from speccompile.certificate.caches import check_caches
from speccompile.certificate.checkpoint import (
    Reference,
    check_distance,
    check_tokenizer,
    dtype_of,
    find_checkpoint,
    is_exact,
    open_reference,
    rows_of,
)
from speccompile.certificate.faults import check_faults
from speccompile.certificate.grammar import GRAMMAR, check_grammar
from speccompile.certificate.greedy import REFERENCE, check_greedy, check_reference, plain_texts
from speccompile.certificate.page import html_from_certificate
from speccompile.certificate.prompts import find_prompts
from speccompile.certificate.results import Check, certificate_from_checks, not_run
from speccompile.certificate.sampled import NUM_SAMPLES, SAMPLED, Tell, check_sampled
from speccompile.errors import BundleError
from speccompile.runtime.engine import load
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.version import VERSION

FAULT_TOKENS = 32  # of a text with planted drafts
GRAMMAR_SHARE = 3  # one of so many sampled texts: verdicts on the host take longer
Progress = Callable[[str], None]
Step = Callable[["Subject"], Check]


@dataclass(frozen=True)
class Options:
    """How much is checked."""

    prompts: Sequence[str | Sequence[int]] | None = None  # texts or token ids; None: short texts of our own
    num_tokens: int = 48
    num_samples: int = NUM_SAMPLES  # texts of each sampled run; a third of them with a grammar
    checkpoint: Path | None = None  # folder of the target's checkpoint; None: where it was when the bundle was built
    use_checkpoint: bool = True  # where it is at hand, with the memory of its float32 weights


class Subject:
    """What checks work on: the loaded bundle, and what several of them use."""

    def __init__(
        self, engine: SpecEngine, bundle: Bundle, options: Options, progress: Progress = lambda message: None
    ) -> None:
        self.engine, self.bundle, self.options, self.progress = engine, bundle, options, progress
        self.prompts = find_prompts(engine, options.prompts)
        longest = max(len(prompt) for prompt in self.prompts)
        self.num_tokens = max(1, min(options.num_tokens, engine.context.max_seq_len - longest))
        self.checkpoint, self.why_not = None, "asked to leave the checkpoint out"
        if options.use_checkpoint:
            self.checkpoint, self.why_not = find_checkpoint(bundle, options.checkpoint)
        self._plain: list[list[int]] | None = None
        self._reference: Reference | None = None

    def tell_texts(self, check: str) -> Tell:
        return lambda done, total: self.progress(f"{check}: texts {done}/{total}")

    @property
    def plain(self) -> list[list[int]]:
        if self._plain is None:
            self._plain = plain_texts(self.engine, self.prompts, self.num_tokens)
        return self._plain

    @property
    def reference(self) -> Reference | None:
        """The target in transformers; None where it cannot be run, then `why_not` says why."""
        if self._reference is None and self.checkpoint is not None and not self.why_not:
            self._reference, self.why_not = open_reference(self.checkpoint, self.bundle.recipe.target.lora)
        return self._reference


def _greedy(subject: Subject) -> Check:
    dtype = dtype_of(subject.bundle.manifest)
    return check_greedy(subject.engine, subject.prompts, subject.plain, subject.num_tokens, dtype)


def _reference(subject: Subject) -> Check:
    if (found := subject.reference) is None or subject.checkpoint is None:
        return not_run(REFERENCE, subject.why_not)
    check, target = _beside(subject, found, subject.plain), subject.bundle.recipe.target
    for name, folder in sorted(target.adapters.items()):  # one merged model at a time
        merged, why_not = open_reference(subject.checkpoint, target.lora, folder)
        if merged is None:
            return not_run(REFERENCE, f"adapter {name}: {why_not}")
        own = _beside(subject, merged, plain_texts(subject.engine, subject.prompts, subject.num_tokens, name))
        facts = {**check.facts, "adapters": {**check.facts.get("adapters", {}), name: own.facts}}
        status = check.status if own.status == "passed" else own.status
        check = replace(check, status=status, facts=facts, summary=f"{check.summary}; adapter {name}: {own.summary}")
    return check


def _beside(subject: Subject, reference: Reference, plain: Sequence[list[int]]) -> Check:
    wanted = [reference.greedy_beside(p, text) for p, text in zip(subject.prompts, plain, strict=True)]
    exact = is_exact(subject.bundle.manifest)
    return check_reference(subject.prompts, plain, wanted, reference.last_logits, exact)


def _tokenizer(subject: Subject) -> Check:
    return check_tokenizer(subject.engine, subject.checkpoint)


def _faults(subject: Subject) -> Check:
    return check_faults(subject.engine, subject.prompts, min(FAULT_TOKENS, subject.num_tokens))


def _sampled(subject: Subject) -> Check:
    num = subject.options.num_samples
    return check_sampled(subject.engine, subject.prompts, num, subject.tell_texts(SAMPLED))


def _grammar(subject: Subject) -> Check:
    num = subject.options.num_samples // GRAMMAR_SHARE
    return check_grammar(subject.engine, subject.prompts, num, subject.tell_texts(GRAMMAR))


def _caches(subject: Subject) -> Check:
    return check_caches(subject.engine, subject.prompts, subject.plain, rows_of(subject.bundle.manifest))


def _distance(subject: Subject) -> Check:
    texts = [[*prompt, *text] for prompt, text in zip(subject.prompts, subject.plain, strict=True)]
    reference, manifest = subject.reference, subject.bundle.manifest
    return check_distance(subject.engine, texts, reference, subject.why_not, manifest)


def _acceptance(subject: Subject) -> Check:
    reference = subject.reference
    return check_acceptance(subject.engine, subject.prompts, subject.plain, reference, subject.why_not)


# In the order in which they run: what is cheap and explains later failures comes first.
STEPS: dict[str, Step] = {
    "tokenizer": _tokenizer,
    "greedy": _greedy,
    "reference": _reference,
    "faults": _faults,
    "sampled": _sampled,
    "grammar": _grammar,
    "caches": _caches,
    "distance": _distance,
    "acceptance": _acceptance,
}


def run_checks(subject: Subject, progress: Progress = lambda message: None) -> list[Check]:
    """Returns the results of all checks."""
    checks = []
    for name, step in STEPS.items():
        progress(name)
        start = time.perf_counter()
        checks.append(replace(step(subject), seconds=time.perf_counter() - start))
    return checks


def verify(path: Path, options: Options | None = None, progress: Progress = lambda message: None) -> dict[str, Any]:
    """Checks a bundle and writes its certificate into its folder, as JSON and as a page; returns it.

    Args:
        progress: called with the name of each check, and "NAME: texts DONE/TOTAL" in the long ones.

    Raises:
        BundleError: the bundle cannot be loaded, or the certificate cannot be written.
        RuntimeFault: a step of the engine failed without planted drafts.
    """
    start = time.perf_counter()
    progress("load")
    engine = load(path)
    engine.controller = None  # no clock decides over drafts
    assert engine.bundle is not None
    subject = Subject(engine, engine.bundle, options or Options(), progress)
    checks = run_checks(subject, progress)
    about = {
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - start, 1),
        "speccompile_version": VERSION,
        "versions": versions_from_environment(),
        "machine": {"platform": platform.platform(), "num_cores": os.cpu_count()},
        "num_prompts": len(subject.prompts),
        "has_given_prompts": subject.options.prompts is not None,
    }
    certificate = certificate_from_checks(engine.bundle, checks, about)
    write_certificate(path, certificate)
    return certificate


def write_certificate(folder: Path, certificate: dict[str, Any]) -> None:
    """Writes the certificate and its page into a bundle's folder; both are replaced by renames."""
    try:
        for name in (CERTIFICATE_PAGE, CERTIFICATE):
            scratch = folder / f".{name}.new"
            if name == CERTIFICATE:
                write_json(scratch, certificate)
            else:
                scratch.write_text(html_from_certificate(certificate), encoding="utf-8")
            scratch.replace(folder / name)
    except OSError as fault:
        got, todo = (
            fault.strerror or str(fault),
            "Copy the bundle to a folder that can be written, and verify it there.",
        )
        raise BundleError(str(folder), got, "a folder that takes the certificate", todo) from fault
