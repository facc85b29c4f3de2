# SPDX-License-Identifier: Apache-2.0
"""The checkpoint of a run: one file that appears whole, with everything that decides how the curve goes on."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from speccompile.bundling.staging import disk_faults
from speccompile.errors import BuildError

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"


@dataclass
class RunRecord:
    """Where a run stands.

    Args:
        digest: of the plan, the text and the number of processes.
        stage: index of the stage that is under way.
        step: its steps that are done.
        rows: the curve: a dict for each step and measurement.
        seconds: wall time by stage.
        model: state_dict of the trained module, {} before the first checkpoint.
        optimizer: state_dict of the optimizer.
    """

    digest: str
    stage: int = 0
    step: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


def open_record(folder: Path, digest: str) -> RunRecord:
    """The record in `folder`, or a new one where there is none.

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


def save_record(folder: Path, record: RunRecord) -> None:
    """Write the checkpoint, and the curve as JSON lines beside it.

    Raises:
        BuildError: the disk is full, or the place cannot be written.
    """
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{CHECKPOINT}.{os.getpid()}"
        shallow = {name: getattr(record, name) for name in asdict(RunRecord(""))}
        try:
            torch.save({**shallow, "rows": json.dumps(record.rows)}, part)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(folder / CHECKPOINT)
        finally:
            part.unlink(missing_ok=True)
        lines = folder / f".{LOG}.{os.getpid()}"
        lines.write_text("".join(json.dumps(row) + "\n" for row in record.rows), encoding="utf-8")
        lines.replace(folder / LOG)
