# SPDX-License-Identifier: Apache-2.0
"""Downloads and the compiling of kernels are shown while a command waits for them."""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from speccompile.cli import options, output
from speccompile.cli.output import live_stages
from speccompile.common.waiting import LOGGER, download_bar, tell
from speccompile.recipe.model_recipe import ModelOptions

MB = 10**6


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    """Returns a function that gives the messages so far."""
    caplog.set_level(logging.INFO, LOGGER)
    return lambda: [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.parametrize("is_disabled", [False, True])
def test_a_download_tells_its_megabytes(is_disabled, told, monkeypatch):
    if is_disabled:
        monkeypatch.setenv("TQDM_DISABLE", "1")  # as the commands set it
    bar = download_bar("org/model")
    transfer = bar(desc="bytes", total=0, initial=0, unit="B", unit_scale=True)
    written = bar(desc="written", total=0, initial=0, unit="B", unit_scale=True)
    with bar(desc="Fetching 3 files", total=3) as files, ThreadPoolExecutor(3) as pool:
        assert told() == []
        for one in (transfer, written):
            one.total += 6 * MB
            one.refresh()
        for _ in pool.map(transfer.update, [MB] * 6):
            pass
        written.update(6 * MB)
        files.update(3)
    transfer.set_description_str("Download complete")
    written.set_description("Written")
    for one in (transfer, written):
        one.close()
    messages = told()
    assert messages[0] == "download org/model: MB 0/6" and messages[-1] == "download org/model: MB 6/6"
    assert len(messages) == len(set(messages)) and files.n == 3


def test_nothing_is_told_of_files_that_are_there(told):
    bar = download_bar("org/model")
    with bar(desc="bytes", total=0, unit="B") as transfer, bar(total=2) as files:
        transfer.refresh()
        files.update(2)
    assert told() == []


def test_what_is_waited_for_is_a_stage_or_a_step_of_one(capsys, monkeypatch):
    shown: list[str] = []
    real = output.text_from_step
    monkeypatch.setattr(output, "text_from_step", lambda message: shown.append(message) or real(message))
    with live_stages() as report:
        tell("download org/model: MB 1/2")
        tell("download org/model: MB 2/2")
        tell("compile the CPU kernels")
        report("check checkpoints")
        tell("download org/draft: MB 1/2")
        report("check checkpoints: draft")
    lines = [line.split()[1:-2] for line in capsys.readouterr().err.splitlines()]
    assert [" ".join(line) for line in lines] == ["download org/model", "compile the CPU kernels", "check checkpoints"]
    assert "check checkpoints: download org/draft: MB 1/2" in shown and "download org/model: MB 1/2" in shown
    tell("after it")  # nobody listens
    assert capsys.readouterr().err == ""


def test_loading_a_bundle_shows_the_compiling_of_kernels(tmp_path, monkeypatch, capsys):
    from speccompile.backends.onnxruntime import kernel_library
    from speccompile.runtime import engine

    monkeypatch.setattr(kernel_library, "code_file", lambda name: tmp_path / "kernels" / name)
    monkeypatch.setattr(kernel_library, "find_compiler", lambda: "c++")
    monkeypatch.setattr(kernel_library, "compile_library", lambda sources, dest, *rest: dest.parent.mkdir())

    def load(*args: Any, **options: Any) -> Any:
        kernel_library._compiled()
        return type("Engine", (), {"bundle": None, "verifier": type("Verifier", (), {"rates": ()})})()

    monkeypatch.setattr(engine, "load", load)
    (tmp_path / "bundle").mkdir()
    options.load_source(str(tmp_path / "bundle"), ModelOptions(), method=None, backend=None, threads=None)
    assert "done compile the CPU kernels" in capsys.readouterr().err
