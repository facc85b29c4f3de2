# SPDX-License-Identifier: Apache-2.0
"""Commands run in the process of the tests, in a folder of their own."""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer.main

from speccompile.cli import build
from speccompile.cli.main import main
from tests.pipeline import fakes

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session", autouse=True)
def kept_commands() -> Iterator[None]:
    """Keeps what typer reads from the functions of all commands, anew for every run of one: 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command in a folder of its own, with the fakes installed; returns (exit code, stdout, stderr)."""
    fakes.install(monkeypatch.setattr, lambda name, module: monkeypatch.setitem(sys.modules, name, module))
    monkeypatch.setattr(build, "check_class", lambda folder: None)  # it imports torch: see test_doctor.py
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Returns a recipe for a pair of tiny checkpoints."""
    return fakes.write_recipe(tmp_path / "in")
