# SPDX-License-Identifier: Apache-2.0
"""What a long command shows: stages of a build, downloads and the compiling of kernels, with and without a terminal."""

import io
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from speccompile.cli import options, output
from speccompile.cli.output import ProgressDisplay, live_stages, text_from_seconds, text_from_step
from speccompile.common.waiting import LOGGER, download_bar, tell
from speccompile.recipe.model_recipe import ModelOptions

ROW = {"train": {"loss": [1.0], "agreement": [0.5], "acceptance_length": 1.5}}


@pytest.fixture
def shown():
    """Returns (display, the clock's seconds as a list of one, a function that gives the lines so far)."""
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, soft_wrap=True)
    return ProgressDisplay(console, Progress(console=console, disable=True), lambda: now[0]), now, (
        lambda: out.getvalue().splitlines()
    )  # fmt: skip


def test_steps_come_with_the_time_that_is_left(shown):
    display, now, lines = shown
    for step in range(1, 101):
        display.step("plain", step, 100, ROW)
        now[0] += 2.0
    first, second, third, *_ = lines()
    assert first.startswith("plain 1/100 loss 1.00") and "left" not in first
    # After 10 more steps of 2 s, 89 are left.
    assert second.startswith("plain 11/100") and second.endswith("about 3 min left")
    assert third.startswith("plain 21/100")
    assert lines()[-1].startswith("plain 100/100") and not lines()[-1].endswith("left")


def test_shares_of_a_stage_come_now_and_then_and_other_messages_once(shown):
    display, now, lines = shown
    display.stage("target: load [x]")
    for done in range(1, 101):
        display.stage(f"text: generate train {done}/100")
        now[0] += 1.0
    display.stage("write")
    told = lines()
    assert told[0] == "target: load [x]" and told[1] == "text: generate train 1/100" and told[-1] == "write"
    assert told[2] == "text: generate train 11/100, about 1 min left"
    assert len(told) == 9


def test_held_out_measures_are_always_shown_and_checkpoints_kept_in_mind(shown):
    display, _, lines = shown
    display.step("plain", 1, 9, ROW)
    display.step("plain", 2, 9, {**ROW, "held_out": ROW["train"]})
    assert lines()[-1].startswith("plain 2/9 held out: loss 1.00")
    assert display.checkpoint is None
    display.saved("plain", 2, 9)
    assert display.checkpoint == "plain 2/9"


@pytest.mark.parametrize(("seconds", "text"), [(3.4, "3 s"), (90, "2 min"), (7200, "2.0 h")])
def test_durations(seconds, text):
    assert text_from_seconds(seconds) == text


@pytest.mark.parametrize(("message", "filled"), [("s: p 0/4", 0), ("s: p 1/4", 6), ("s: p 4/4", 24), ("s: p 5/4", 24)])
def test_a_share_is_a_bar(message, filled):
    text = text_from_step(message)
    assert text.plain == f"s: p {'━' * 24} {message.split()[-1]}"
    assert [span.end - span.start for span in text.spans if str(span.style) == "green"] == ([filled] if filled else [])


@pytest.mark.parametrize("message", ["export target", "compile target: merge_linears", "a: b/c", "x: 1/0", "done 3"])
def test_any_other_message_stays_as_it_is(message):
    assert text_from_step(message).plain == message


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

    monkeypatch.setattr(kernel_library, "code_file", lambda name: tmp_path / name)
    monkeypatch.setattr(kernel_library, "find_compiler", lambda: "c++")
    monkeypatch.setattr(kernel_library, "compile_library", lambda *_: "")

    def load(*args: Any, **options: Any) -> Any:
        kernel_library._compiled()
        return type("Engine", (), {"bundle": None, "verifier": type("Verifier", (), {"rates": ()})})()

    monkeypatch.setattr(engine, "load", load)
    (tmp_path / "bundle").mkdir()
    options.load_source(str(tmp_path / "bundle"), ModelOptions(), method=None, backend=None, threads=None)
    assert "done compile the CPU kernels" in capsys.readouterr().err
