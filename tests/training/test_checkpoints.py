# SPDX-License-Identifier: Apache-2.0
"""The checkpoint of a run: read back unchanged, and a full disk is a BuildError that leaves no partial file."""

import errno
import os
import resource
import signal

import numpy as np
import pytest
import torch

from speccompile.errors import BuildError
from speccompile.training import states
from speccompile.training.checkpoints import CHECKPOINT, RunRecord, open_record, save_record


def record(size: int) -> RunRecord:
    weights = torch.arange(size, dtype=torch.float32)
    times = {"seconds": {"plain": 1.5}, "cpu_seconds": {"plain": 1.25}}
    return RunRecord(
        [{"a": 1}, {"b": 2}],
        1,
        5,
        [{"step": 5}],
        **times,
        model={"weight": weights},
        optimizer={"state": {0: weights + 1}},
    )


def test_a_checkpoint_is_read_back(tmp_path):
    save_record(tmp_path / "run", record(100))
    found, change = open_record(tmp_path / "run", [{"a": 1}, {"b": 2}])
    assert (found.stage, found.step, found.rows, found.seconds) == (1, 5, [{"step": 5}], {"plain": 1.5})
    assert change == "" and found.settings == [{"a": 1}, {"b": 2}]
    assert found.cpu_seconds == {"plain": 1.25}
    assert torch.equal(found.model["weight"], torch.arange(100.0))
    assert torch.equal(found.optimizer["state"][0], torch.arange(100.0) + 1)


@pytest.mark.parametrize(
    ("settings", "progress", "change"),
    [
        ([{"a": 1}, {"b": 3}], (1, 0), "b was 2, is 3"),  # of stage 2, which begins anew
        ([{"a": 1}, {"b": 2, "c": 5}], (1, 0), "c was None, is 5"),
        ([{"a": 1}], (1, 0), "b was 2, is None"),  # without it
        ([{"a": 1}, {"b": 2}], (2, 0), ""),
        ([{"a": 7}, {"b": 2}], None, "a was 1, is 7"),
        ([{"b": 2}], None, "b was None, is 2"),
    ],
)
def test_a_changed_setting_costs_the_stages_that_depend_on_it(tmp_path, settings, progress, change):
    run = record(4)
    for run.stage, run.step in ((0, 4), (1, 0), (1, 4), (2, 0)):
        save_record(tmp_path, run)
    if progress is None:
        with pytest.raises(BuildError) as caught:
            open_record(tmp_path, settings)
        assert caught.value.got == f"the checkpoint of a run with another setting: {change}"
        assert caught.value.todo == f"Remove {tmp_path} to begin anew, or give another output."
        return
    found, changed = open_record(tmp_path, settings)
    assert ((found.stage, found.step), changed, found.settings) == (progress, change, settings)


def test_a_stage_can_be_added_to_a_finished_run(tmp_path):
    run = RunRecord([{"a": 1}], 1, 0)
    save_record(tmp_path, run)
    found, changed = open_record(tmp_path, [{"a": 1}, {"b": 2}])
    assert (found.stage, found.step, changed) == (1, 0, "b was None, is 2")
    found.step = 4
    save_record(tmp_path, found)
    again, changed = open_record(tmp_path, [{"a": 1}, {"b": 3}])
    assert (again.stage, again.step, changed) == (1, 0, "b was 2, is 3")


@pytest.mark.parametrize("limit", [1, 100_000, 390_000])
def test_a_full_disk_is_a_build_error_and_keeps_the_checkpoint_before(tmp_path, limit):
    # A limit on the size of a file: a write fails in the middle, as it does on a full disk.
    save_record(tmp_path, record(10))
    before, names = (tmp_path / CHECKPOINT).read_bytes(), sorted(p.name for p in tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises(BuildError) as caught:
            save_record(tmp_path, record(50_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.where == str(tmp_path) and "File too large" in caught.value.got
    assert "Free space" in caught.value.todo
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_outputs_that_the_disk_does_not_take_leave_no_file(tmp_path, monkeypatch):
    def save(file, array):
        file.write(array.tobytes()[:8])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", save)
    with pytest.raises(BuildError, match="No space left"):
        states._save(tmp_path / "hidden-train-00000.npy", np.zeros(64))
    assert not list(tmp_path.iterdir())
