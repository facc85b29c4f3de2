# SPDX-License-Identifier: Apache-2.0
"""The checkpoint of a run: one file, written atomically, with everything that a resumed run needs."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch

from speccompile.bundle.format import RUN, read_record, write_mark
from speccompile.bundle.staging import check_names, disk_faults
from speccompile.errors import BuildError

CHECKPOINT, LOG, STATES, EVENTS = "checkpoint.pt", "log.jsonl", "states.json", "events"
STAGE_END = "checkpoint-stage-1.pt"  # from there stage 2, which may be added later, can begin anew


@dataclass
class RunRecord:
    """The progress of a run.

    Args:
        cpu_seconds: CPU time by stage, of all threads of the first process.
        model: state_dict of the trained module, {} before the first checkpoint.
    """

    settings: list[dict[str, Any]]  # for each stage, what its weights depend on besides the stages before it
    stage: int = 0
    step: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


def check_run_folder(folder: Path) -> None:
    """Checks that a run may be written to a folder. Raises BuildError: it holds files with its names of no run."""
    check_names(folder, (CHECKPOINT, STAGE_END, LOG, STATES, EVENTS), RUN)


def make_run_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if read_record(folder) is None:
        write_mark(folder, RUN)


def open_record(folder: Path, settings: list[dict[str, Any]]) -> tuple[RunRecord, str]:
    """Returns the record in `folder` to go on from, or a new one, and the setting that changed since, or "".

    A stage whose settings changed begins anew, after the stages before it, which are kept.

    Raises:
        BuildError: it is damaged, or a setting changed on which all of it depends.
    """
    todo = f"Remove {folder} to begin anew, or give another output."
    changes = []
    for path in (folder / CHECKPOINT, folder / STAGE_END):
        if path.is_file():
            record = _read_record(path, todo)
            changes.append(_change(record.settings, settings))
            num_begun = record.stage + bool(record.step)
            if record.settings[:num_begun] == settings[:num_begun]:
                record.settings = settings
                return record, changes[0]
    if not changes:
        return RunRecord(settings), ""
    got = f"the checkpoint of a run with another setting: {changes[0]}"
    raise BuildError(str(folder), got, "one of this run", todo)


def _read_record(path: Path, todo: str) -> RunRecord:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        return RunRecord(**{**held, "rows": json.loads(held["rows"]), "settings": json.loads(held["settings"])})
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as fault:
        got = f"a file that cannot be read ({type(fault).__name__})"
        raise BuildError(str(path), got, "the checkpoint of a run", todo) from fault


def _change(before: Any, now: Any, where: str = "") -> str:
    if isinstance(before, list) and isinstance(now, list) and where == "":
        stages: Iterable[tuple[Any, Any]] = itertools.zip_longest(before, now, fillvalue={})
        return next(filter(None, (_change(*stage) for stage in stages)), "")
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*now, *(key for key in before if key not in now)]
        pairs = ((before.get(key), now.get(key), f"{where}.{key}" if where else str(key)) for key in keys)
        return next(filter(None, (_change(*pair) for pair in pairs)), "")
    return "" if before == now else f"{where} was {before}, is {now}"


class _Writer:
    """A file for torch.save that keeps the fault of a failed write: torch raises a RuntimeError instead."""

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
        self._file.flush()


def _save(file: IO[bytes], values: dict[str, Any]) -> None:
    writer = _Writer(file)
    try:
        torch.save(values, cast("IO[bytes]", writer))
    except (OSError, RuntimeError) as fault:
        if writer.fault is None:
            raise
        raise writer.fault from fault


def save_record(folder: Path, record: RunRecord) -> None:
    """Writes the checkpoint, and the curve as JSON lines; the end of stage 1 stays. Raises BuildError: it cannot."""
    with disk_faults(folder):
        make_run_folder(folder)
        part, copy = (folder / f".{name}.{os.getpid()}" for name in (CHECKPOINT, STAGE_END))
        shallow = {name: getattr(record, name) for name in asdict(RunRecord([]))}
        texts = {name: json.dumps(getattr(record, name)) for name in ("rows", "settings")}
        has_ended = (record.stage, record.step) == (1, 0)
        try:
            with part.open("wb") as file:
                _save(file, {**shallow, **texts})
                file.flush()
                os.fsync(file.fileno())
            if has_ended:
                shutil.copyfile(part, copy)
                copy.replace(folder / STAGE_END)
            part.replace(folder / CHECKPOINT)
        finally:
            part.unlink(missing_ok=True)
            copy.unlink(missing_ok=True)
        lines = folder / f".{LOG}.{os.getpid()}"
        try:
            lines.write_text("".join(json.dumps(row) + "\n" for row in record.rows), encoding="utf-8")
            lines.replace(folder / LOG)
        finally:
            lines.unlink(missing_ok=True)
