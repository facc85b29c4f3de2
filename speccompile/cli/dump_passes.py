# SPDX-License-Identifier: Apache-2.0
"""Writes the graphs of a build as text after each pass that changes them: `build --dump-passes`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

_LOGGER = "speccompile.passes.base"  # its records have the model


class PassDump(logging.Handler):
    """Writes FOLDER/STAGE/NUMBER-PASS.txt. `folder`: new or empty."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.DEBUG)
        self._folder, self._stage, self._number = folder, "", 0

    def begin(self, message: str) -> None:
        """Takes the stage of a message "STAGE" or "STAGE: STEP"."""
        stage = message.partition(": ")[0].replace(" ", "-")
        if stage != self._stage:
            self._stage, self._number = stage, 0

    def emit(self, record: logging.LogRecord) -> None:
        from speccompile.passes.text import text_from_model

        model, name, num_rewrites = record.graph  # type: ignore[attr-defined]
        if not num_rewrites:
            return
        folder = self._folder / self._stage
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self._number:02}-{name}.txt").write_text(text_from_model(model), encoding="utf-8")
        self._number += 1


@contextlib.contextmanager
def dumped_passes(folder: Path | None, progress: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Yields the callback that writes passes of a build; None: no folder. Raises BuildError: it is not new or empty."""
    if folder is None:
        yield progress
        return
    from speccompile.bundle.staging import claim_folder

    dump, logger = PassDump(claim_folder(folder).path), logging.getLogger(_LOGGER)
    level = logger.level

    def report(message: str) -> None:
        dump.begin(message)
        progress(message)

    logger.addHandler(dump)
    logger.setLevel(logging.DEBUG)
    try:
        yield report
    finally:
        logger.removeHandler(dump)
        logger.setLevel(level)
