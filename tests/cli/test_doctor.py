# SPDX-License-Identifier: Apache-2.0
"""What `speccompile doctor` prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speccompile.cli.main import main
from tests.checkpoints import checkpoint_lab as lab


def run(*words: object) -> int:
    """Returns the command's exit code."""
    return main([str(w) for w in words])


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Returns a speculator and its target."""
    return lab.eagle3_ours(tmp_path / "speculator"), lab.write_target(tmp_path / "target")


def test_a_sound_checkpoint(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    speculator, target = folders
    assert run("doctor", speculator, "--target", target) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"EAGLE-3 drafter (first release, SpecForge)  {speculator}",
        f"16 tensors, 4,148 parameters, weights read; against {target}",
        "nothing found",
    ]


def test_one_finding_is_one_line_errors_first(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    speculator, target = folders
    lab.edit(speculator, lambda held: held.update({"fc.weight": held["fc.weight"] * 0, "d2t": held["d2t"] * 0}))
    lab.edit(speculator, lambda held: held.pop("norm.weight"))
    assert run("doctor", speculator, "--target", target, "--values") == 3
    _, _, *findings, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in findings] == [
        ["error", "keys.missing"], ["error", "eagle3.maps"], ["warning", "values.zero"],
    ]  # fmt: skip
    assert all("got " in line and "; expected " in line and line.endswith(".") for line in findings)
    assert last == "2 errors, 1 warning"


def test_headers_alone(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    speculator, _ = folders
    lab.edit(speculator, lambda held: held.update({"fc.weight": held["fc.weight"] * 0}))
    assert run("doctor", speculator, "--no-values") == 0
    out = capsys.readouterr().out
    assert "headers alone read; no target given" in out and "nothing found" in out


def test_the_report_as_json(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    speculator, target = folders
    lab.set_config(speculator, draft_vocab_size=None)
    assert run("doctor", speculator, "--target", target, "--json") == 3
    report = json.loads(capsys.readouterr().out)
    (finding,) = report.pop("findings")
    assert set(finding) == {"severity", "check", "where", "got", "expected", "todo"}
    assert (finding["check"], finding["severity"]) == ("config.sizes", "error")
    assert report["sizes"]["draft_vocab"] == lab.DRAFT_VOCAB
    del report["sizes"]
    assert report == {
        "folder": str(speculator),
        "format": "eagle3/ours",
        "label": "EAGLE-3 drafter (first release, SpecForge)",
        "method": "eagle3",
        "target": str(target),
        "num_tensors": 16,
        "num_params": 4148,
        "has_read_values": True,
        "num_errors": 1,
        "num_warnings": 0,
        "exit_code": 3,
    }
    assert run("doctor", speculator, "--set", f"draft_vocab_size={lab.DRAFT_VOCAB}", "--json") == 0


def test_a_folder_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", tmp_path) == 3
    assert "error  files  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--target", "./nowhere"), 3, "a checkpoint folder or a hub id"),
        (("--set", "half"), 2, "KEY=VALUE"),
    ],
)
def test_what_is_wrong_beside_the_speculator(
    words: tuple[str, ...], code: int, text: str, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("doctor", folders[0], "--json", *words) == code
    assert text in json.loads(capsys.readouterr().out)["error"]["expected"]
