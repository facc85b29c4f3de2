# SPDX-License-Identifier: Apache-2.0
"""What a build prints, in this process or in a child: paths, hints, values, errors, the log."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from speccompile.bundle.report import dotted_keys, text_from_value
from speccompile.cli import child_build
from speccompile.errors import BuildError, SpecCompileError
from speccompile.prepare import prepare
from speccompile.recipe import predict
from speccompile.recipe.model_recipe import ModelOptions
from tests.pipeline import fakes

WHY = "no CUDA device: built on a machine without one, not run"


@pytest.mark.parametrize("folder", ["[red]x", "with space", "it's"])
def test_paths_are_printed_as_they_are_and_quoted_in_the_hint(run, recipe, folder):
    code, out, err = run("build", recipe, "-o", folder)
    assert code == 0, err
    assert out.startswith(f"{folder}: ")
    quoted = {"it's": "'it'\"'\"'s'"}.get(folder, f"'{folder}'")
    assert f"Try: speccompile generate {quoted} --prompt" in out
    code, out, _ = run("inspect", folder)
    assert out.splitlines()[0].startswith(f"bundle {folder} ")


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_model_is_served(run, recipe, where):
    (recipe.parent / "big" / where).write_text(json.dumps({"chat_template": "{{ messages }}"}))
    out = run("build", recipe, "-o", "made")[1]
    assert "Try: speccompile serve made," in out and "generate" not in out


def test_a_build_for_a_device_that_is_not_here_says_so_first_and_last(run, recipe, monkeypatch):
    monkeypatch.setattr(fakes.FakeBackend, "why_unchecked", lambda self, file=None: WHY)
    code, out, err = run("build", recipe, "-o", "made")
    assert code == 0
    first, *others = err.splitlines()
    assert first.startswith("warning: no CUDA device: nothing is tuned or checked")
    skipped = [line for line in others if "not run: no CUDA device" in line]
    assert [line.split()[:3] for line in skipped] == [
        ["skip", "tune", "target"],
        ["skip", "tune", "draft"],
        ["skip", "check", "graphs"],
    ]
    assert not any(line.startswith(("done tune", "done check g")) for line in others)
    assert "Try: speccompile inspect made" in out and "generate" not in out
    stages = json.loads(Path("made/manifest.json").read_text())["stages"]
    assert [s["name"] for s in stages if s.get("skipped") == WHY] == ["tune target", "tune draft", "check graphs"]
    assert "warning: no CUDA device" in run("build", recipe, "--dry-run")[2]
    why = "cudaErrorInsufficientDriver: the driver is too old: built, not run"
    monkeypatch.setattr(fakes.FakeBackend, "why_unchecked", lambda self, file=None: why)
    said = "warning: cudaErrorInsufficientDriver: the driver is too old: nothing is tuned"
    assert said in run("build", recipe, "--dry-run")[2]


def test_a_build_that_runs_here_warns_of_nothing(run, recipe):
    err = run("build", recipe, "-o", "made")[2]
    assert "warning" not in err and "not run" not in err


@pytest.mark.parametrize("value", [None, True, False, 3, 0.5, [], ["a", 1], "auto", "true", "null", "3", "a: b", ""])
def test_shown_values_can_be_put_into_a_recipe(value):
    assert yaml.safe_load(text_from_value(value)) == value


def report_page() -> str:
    """Returns the report, without the titles that phones show beside each value."""
    return re.sub(r' data-of="[^"]*"', "", Path("made/report.html").read_text())


def test_dry_run_and_report_show_values_as_a_recipe_has_them(run, recipe):
    out = run("build", recipe, "--dry-run")[1]
    plan = json.loads(run("build", recipe, "--dry-run", "--json")[1])["plan"]
    rows = dict(line.split(maxsplit=1) for line in out.splitlines() if len(line.split(maxsplit=1)) == 2)
    for key, value in dotted_keys(plan):
        assert yaml.safe_load(rows[key]) == value, key
    assert run("build", recipe, "-o", "made")[0] == 0
    page = report_page()
    assert ">None<" not in page and ">True<" not in page and ">False<" not in page
    assert "<td>target.num_layers</td><td>null</td>" in page


def test_columns_of_numbers_are_aligned_right_with_their_titles(run, recipe):
    assert run("build", recipe, "-o", "made")[0] == 0
    page = report_page()
    assert "<th>file</th><th class=n>size</th><th>sha256</th>" in page
    assert "<th>operator</th><th class=n>before the passes</th><th class=n>after</th>" in page
    assert "<tr><td>A</td><td class=n>2</td><td class=n>0</td></tr>" in page


def test_narrow_terminals_do_not_cut_keys(run, recipe, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = run("build", recipe, "--dry-run")[1]
    assert "…" not in out
    assert "engine.max_draft_nodes" in out and "speculator.allow_tokenizer_mismatch" in out
    assert all(len(line) <= 40 for line in out.splitlines())


def test_a_dry_run_compares_with_the_machine_and_gives_a_time(run, recipe, monkeypatch):
    code, out, err = run("build", recipe, "-o", "far/away", "--dry-run")
    assert code == 0 and "warning" not in err
    out = " ".join(out.split())
    assert "free on this machine: memory " in out and "the disk of " in out
    assert " caches " in out and "of them adapters" not in out and "builder peak" not in out  # no graph has them
    assert "the build takes about 20 s to 2 min (as 41 builds on two busy cores: " in out
    monkeypatch.setattr(predict, "available_memory", lambda: 1000)
    code, out, err = run("build", recipe, "--dry-run")
    assert code == 0 and "warning: building: about " in err and "1000 B free. Build on a larger machine." in err
    assert "warning: decoding: about " in err and "lower engine.max_batch_size" in err
    document = json.loads(run("build", recipe, "--dry-run", "--json")[1])
    assert [row["free_bytes"] for row in document["machine"]][:2] == [1000, 1000]
    assert len(document["build_seconds"]) == 2


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
