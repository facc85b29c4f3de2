# SPDX-License-Identifier: Apache-2.0
"""The checkpoint of a run: one file, written atomically, with everything that a resumed run needs."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch

from speccompile.bundling.guard import check_names
from speccompile.bundling.records import RUN, read_record, write_mark
from speccompile.bundling.staging import disk_faults
from speccompile.errors import BuildError

CHECKPOINT, LOG, STATES, EVENTS = "checkpoint.pt", "log.jsonl", "states.json", "events"


@dataclass
class RunRecord:
    """The progress of a run.

    Args:
        digest: of the plan, the text and the number of processes.
        stage: index of the current stage.
        step: steps of that stage that are done.
        rows: the curve: a dict for each step and measurement.
        seconds: wall time by stage.
        cpu_seconds: CPU time by stage, of all threads of the first process.
        model: state_dict of the trained module, {} before the first checkpoint.
        optimizer: state_dict of the optimizer.
    """

    digest: str
    stage: int = 0
    step: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


def check_run_folder(folder: Path) -> None:
    """Checks that a run may be written to a folder.

    Raises:
        BuildError: it holds files with a run's names that no run wrote.
    """
    check_names(folder, (CHECKPOINT, LOG, STATES, EVENTS), RUN)


def make_run_folder(folder: Path) -> None:
    """Makes the folder of a run, with the mark by which `check_run_folder` knows it."""
    folder.mkdir(parents=True, exist_ok=True)
    if read_record(folder) is None:
        write_mark(folder, RUN)


def open_record(folder: Path, digest: str) -> RunRecord:
    """Returns the record in `folder`, or a new one where there is none.

    Raises:
        BuildError: it is damaged, or of another run.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        return RunRecord(digest)
    todo = f"Remove {folder} to begin anew, or give another output."
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        record = RunRecord(**{**held, "rows": json.loads(held["rows"])})
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as fault:
        got = f"a file that cannot be read ({type(fault).__name__})"
        raise BuildError(str(path), got, "the checkpoint of a run", todo) from fault
    if record.digest != digest:
        got = "the checkpoint of a run with another recipe, text, target or number of processes"
        raise BuildError(str(path), got, "one of this run", todo)
    return record


class _Writer:
    """A file for torch.save that keeps the fault of a failed write: torch raises a RuntimeError instead.

    Args:
        file: opened for writing bytes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.fault: OSError | None = None

    def write(self, data: bytes) -> int:
        """Writes to the file, and keeps the fault of a write that fails."""
        try:
            return self._file.write(data)
        except OSError as fault:
            self.fault = self.fault or fault
            raise

    def flush(self) -> None:
        """Flushes the file."""
        self._file.flush()


def _save(file: IO[bytes], values: dict[str, Any]) -> None:
    """Writes to an open file by torch.save.

    Raises:
        OSError: the file cannot be written.
    """
    writer = _Writer(file)
    try:
        torch.save(values, cast("IO[bytes]", writer))
    except (OSError, RuntimeError) as fault:
        if writer.fault is None:
            raise
        raise writer.fault from fault


def save_record(folder: Path, record: RunRecord) -> None:
    """Writes the checkpoint, and the curve as JSON lines beside it.

    Raises:
        BuildError: the disk is full, or the folder cannot be written.
    """
    with disk_faults(folder):
        make_run_folder(folder)
        part = folder / f".{CHECKPOINT}.{os.getpid()}"
        shallow = {name: getattr(record, name) for name in asdict(RunRecord(""))}
        try:
            with part.open("wb") as file:
                _save(file, {**shallow, "rows": json.dumps(record.rows)})
                file.flush()
                os.fsync(file.fileno())
            part.replace(folder / CHECKPOINT)
        finally:
            part.unlink(missing_ok=True)
        lines = folder / f".{LOG}.{os.getpid()}"
        lines.write_text("".join(json.dumps(row) + "\n" for row in record.rows), encoding="utf-8")
        lines.replace(folder / LOG)
