# SPDX-License-Identifier: Apache-2.0
"""Builds in a child process: its errors and log are the parent's, and it ends with the parent."""

import logging
import subprocess
import sys

import pytest

from speccompile.cli import child_build
from speccompile.errors import BuildError, SpecCompileError
from speccompile.prepare import prepare
from speccompile.recipe.model_recipe import ModelOptions
from tests.pipeline import fakes

WRITES = "import json, sys; sys.stdin.read(); [print(json.dumps(line), flush=True) for line in {}]; {}"


def write_child(monkeypatch: pytest.MonkeyPatch, *lines: object, end: str = "") -> list[subprocess.Popen[str]]:
    """Puts a child that writes lines in the place of the real one."""
    started, popen = list[subprocess.Popen[str]](), subprocess.Popen

    def start(command: list[str], **options: object) -> subprocess.Popen[str]:
        started.append(popen([sys.executable, "-c", WRITES.format(lines, end)], **options))  # type: ignore[call-overload]
        return started[0]

    monkeypatch.setattr(child_build.subprocess, "Popen", start)
    return started


def test_an_error_of_the_child_is_the_error_of_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    model = fakes.make_checkpoint(tmp_path / "model")
    options = ModelOptions(settings=("engine.max_seq_len=4096",))
    with pytest.raises(SpecCompileError) as own:
        prepare(str(model), options)
    with pytest.raises(type(own.value)) as found:
        child_build.prepare_in_child(str(model), options, lambda stage: None)
    assert str(found.value) == str(own.value)


def test_stages_and_log_are_passed_on(tmp_path, monkeypatch, caplog):
    bundle = {"path": str(tmp_path), "name": "n", "is_kept": True}
    log = ["log", ["speccompile.some", logging.WARNING, "no 100 % sure"]]
    write_child(monkeypatch, ["stage", "export target"], log, ["bundle", bundle])
    stages: list[str] = []
    found = child_build.prepare_in_child("m", ModelOptions(), stages.append)
    assert (found.path, found.name, stages) == (tmp_path, "n", ["export target"])
    assert caplog.messages == ["no 100 % sure"]


def test_a_child_that_dies_is_an_error(monkeypatch):
    write_child(monkeypatch, ["stage", "export target"], end="sys.exit(3)")
    with pytest.raises(BuildError, match="a child process that ended with 3; expected a bundle"):
        child_build.prepare_in_child("m", ModelOptions(), lambda stage: None)


def test_an_interrupt_ends_the_child(monkeypatch):
    def interrupt(stage: str) -> None:
        raise KeyboardInterrupt

    started = write_child(monkeypatch, ["stage", "export target"], end="import time; time.sleep(600)")
    with pytest.raises(KeyboardInterrupt):
        child_build.prepare_in_child("m", ModelOptions(), interrupt)
    assert started[0].returncode is not None
