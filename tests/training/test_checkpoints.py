# SPDX-License-Identifier: Apache-2.0
"""The checkpoint of a run: read back unchanged, and a full disk is a BuildError that leaves no partial file."""

from __future__ import annotations

import resource
import signal

import pytest
import torch

from speccompile.errors import BuildError
from speccompile.training.checkpoints import CHECKPOINT, RunRecord, open_record, save_record


def record(size: int) -> RunRecord:
    weights = torch.arange(size, dtype=torch.float32)
    times = {"seconds": {"plain": 1.5}, "cpu_seconds": {"plain": 1.25}}
    return RunRecord(
        "digest", 1, 5, [{"step": 5}], **times, model={"weight": weights}, optimizer={"state": {0: weights + 1}}
    )


def test_a_checkpoint_is_read_back(tmp_path):
    save_record(tmp_path / "run", record(100))
    found = open_record(tmp_path / "run", "digest")
    assert (found.stage, found.step, found.rows, found.seconds) == (1, 5, [{"step": 5}], {"plain": 1.5})
    assert found.cpu_seconds == {"plain": 1.25}
    assert torch.equal(found.model["weight"], torch.arange(100.0))
    assert torch.equal(found.optimizer["state"][0], torch.arange(100.0) + 1)


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
