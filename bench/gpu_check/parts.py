# SPDX-License-Identifier: Apache-2.0
"""What is checked and measured of a backend on a GPU, in parts; each runs in a process of its own.

A part that dies or hangs hides nothing of the others. Bundles are built by the first part and kept in WORK/cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.gpu_check import checks, decoding, report


class Subject:
    """A backend under test; a subclass has `why_not_run` and `tokens`."""

    name: str
    overrides: tuple[str, ...]  # of recipes
    max_tie_gap: float  # logits nearer than this may change their order in its precision

    def why_not_run(self) -> dict[str, Any] | None:
        """Returns the result of every part where the backend cannot run; None where it can."""
        raise NotImplementedError

    def tokens(self, work: Path) -> dict[str, Any]:
        """Checks tokens and what else the backend promises."""
        raise NotImplementedError

    def build(self, work: Path) -> Path:
        """Returns the example pair."""
        return decoding.build_bundle(work, self.name, decoding.PAIR, *self.overrides)

    def equality_rows(self, bundle: Path, reference: decoding.Reference) -> list[dict[str, Any]]:
        source = "transformers' tokens on a CPU" + ("" if reference.model is None else ", ties by one forward here")
        rows = decoding.equality_rows(bundle, decoding.golden_rows(), reference, self.max_tie_gap)
        return [report.row("reference", source), *rows]

    def speed(self, work: Path) -> dict[str, Any]:
        """Measures tokens per second."""
        timed, raw = decoding.speed_rows(self.build(work), decoding.golden_rows(), decoding.Reference())
        return report.result(timed, raw=raw)

    def hybrid(self, work: Path) -> dict[str, Any]:
        """Checks and measures the example hybrid."""
        return report.result(decoding.hybrid_rows(work, self.name, self.max_tie_gap, *self.overrides))

    def server(self, work: Path) -> dict[str, Any]:
        """Checks the server under load."""
        return report.result(checks.server_rows(self.build(work), work))

    def wide(self, work: Path) -> dict[str, Any]:
        """Measures a large vocabulary."""
        build = decoding.wide_builder(work, self.name, *self.overrides)
        return report.result(checks.wide_rows(build, decoding.MODEL, work))


def run(subject: Subject, part: str, work: Path) -> dict[str, Any]:
    """Returns the result of a part, or why the backend cannot run here."""
    return subject.why_not_run() or dict(getattr(subject, part)(work))
