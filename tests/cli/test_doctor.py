# SPDX-License-Identifier: Apache-2.0
"""What `speccompile doctor` prints, and its exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from speccompile.cli.doctor import parse_overrides
from speccompile.cli.main import main
from speccompile.doctor.findings import Finding
from speccompile.doctor.probe import Measured, ProbeReport
from tests.checkpoints import checkpoint_lab as lab


def run(*words: object) -> int:
    """Returns the command's exit code."""
    return main([str(w) for w in words])


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Returns a speculator and its target."""
    return lab.eagle3_ours(tmp_path / "speculator"), lab.write_target(tmp_path / "target")


def test_a_sound_checkpoint(folders, capsys):
    speculator, target = folders
    assert run("doctor", speculator, "--target", target) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"EAGLE-3 drafter (first release, SpecForge)  {speculator}",
        f"16 tensors, 4,148 parameters, weights read; against {target}",
        "nothing found",
    ]


def test_one_finding_is_one_line_errors_first(folders, capsys):
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


def test_headers_alone(folders, capsys):
    speculator, _ = folders
    lab.edit(speculator, lambda held: held.update({"fc.weight": held["fc.weight"] * 0}))
    assert run("doctor", speculator, "--no-values") == 0
    out = capsys.readouterr().out
    assert "headers alone read; no target given" in out and "nothing found" in out


def test_the_report_as_json(folders, capsys):
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


def test_a_folder_that_cannot_be_read(tmp_path, capsys):
    assert run("doctor", tmp_path) == 3
    assert "error  files  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--target", "./nowhere"), 3, "a checkpoint folder, a GGUF file or a hub id"),
        (("--set", "half"), 2, "KEY=VALUE"),
        (("--probe",), 2, "the model on which --probe drafts"),
        (("--prompts", "prompts.jsonl"), 2, "--probe, which reads them"),
    ],
)
def test_what_is_wrong_beside_the_speculator(words, code, text, folders, capsys):
    assert run("doctor", folders[0], "--json", *words) == code
    assert text in json.loads(capsys.readouterr().out)["error"]["expected"]


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the arguments with which the drafter is run, once it is: the report is made up."""
    stated = Measured({}, 96, 1.4, (0.3, 0.25), 0.0, 0.0)
    better = Measured({"layers": [1, 2]}, 96, 2.0, (0.6, 0.5), 0.6, 0.05)
    todo = "Give speculator.layers: [1, 2] in the recipe."
    finding = Finding("error", "probe", "config.json (ids)", "layers [2, 3]", "[1, 2], with which it is 2.00", todo)
    report = ProbeReport(
        "otherwise", "", {"layers": [1, 2]}, {"norm_output": [True]}, 3, 2, (stated, better), (finding,)
    )
    calls: list[Any] = []

    def probe(*words: Any, **options: Any) -> ProbeReport:
        calls.append((words, options))
        return report

    monkeypatch.setattr("speccompile.certificate.probe.probe_checkpoint", probe)
    return calls


def test_a_probe_is_printed_after_the_findings(folders, probed, tmp_path, capsys):
    speculator, target = folders
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": [1, 2]}\n')
    words = ("--target", target, "--probe", "--prompts", prompts, "--set", "norm_output=true")
    assert run("doctor", speculator, *words) == 3
    ((given, options),) = probed
    assert given == (str(speculator), str(target)) and options.pop("progress") is not None
    assert options == {"prompts": ["a", [1, 2]], "overrides": {"norm_output": True}}
    assert capsys.readouterr().out.splitlines()[2:] == [
        "nothing found",
        "reading        length  beside stated  accepted / tried by position",
        "as stated      1.40                   0.30 0.25",
        "layers [1, 2]  2.00    +0.60 ± 0.05   0.60 0.50",
        "3 texts of the target, 96 chains of 2 drafts",
        "not worse on these texts: norm_output true",
        "error  probe  config.json (ids): got layers [2, 3]; expected [1, 2], with which it is 2.00."
        " Give speculator.layers: [1, 2] in the recipe.",
        "probe: the weights mean layers [1, 2]",
    ]


def test_a_probe_is_part_of_the_json(folders, probed, capsys):
    speculator, target = folders
    assert run("doctor", speculator, "--target", target, "--probe", "--json") == 3
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == 3 and [f["check"] for f in report["findings"]] == ["probe"]
    assert (report["probe"]["verdict"], report["probe"]["meant"]) == ("otherwise", {"layers": [1, 2]})
    assert report["probe"]["readings"][1] == {
        "changed": {"layers": [1, 2]}, "num_starts": 96, "mean_acceptance_length": 2.0,
        "by_position": [0.6, 0.5], "gain": 0.6, "standard_error": 0.05,
    }  # fmt: skip


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads that do not divide": ({"num_attention_heads": 3, "head_dim": None}, "num_attention_heads"),
    "a head of odd width": ({"head_dim": 5}, "RoPE requires an even rotary dimension"),
    "an unknown activation": ({"hidden_act": "sillu"}, "KeyError: 'sillu'"),
    "angles without a factor": ({"rope_scaling": {"rope_type": "yarn"}}, "Missing required keys"),
    "experts that are shared unevenly": (
        {"model_type": "deepseek_v2", "n_routed_experts": 4, "num_experts_per_tok": 9},
        "num_experts_per_tok",
    ),
    "GPT-2's width": (
        {
            "model_type": "gpt2",
            "n_embd": 15,
            "hidden_size": None,
            "n_head": 4,
            "n_layer": 2,
            "architectures": ["GPT2LMHeadModel"],
        },
        "must be divisible by num_heads",
    ),
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_models_own_class_rejects_is_seen_before_a_build(changes, words, tmp_path, capsys):
    speculator, target = lab.medusa_ours(tmp_path / "speculator"), lab.write_target(tmp_path / "target")
    words_of_build = ("build", target, "--weights", "random", "--dry-run", "--set", "engine.max_seq_len=32")
    assert (run(*words_of_build), run("doctor", speculator, "--target", target)) == (0, 0)
    lab.set_config(target, **changes)
    capsys.readouterr()
    for command in (words_of_build, ("doctor", speculator, "--target", target)):
        assert run(*command) in (3, 4), command[0]
        told = " ".join(capsys.readouterr().err.split())
        assert words in told and str(target) in told.replace(" ", ""), told


def test_what_is_no_json_is_a_text():
    deep = "[" * 9999
    assert parse_overrides([f"a={deep}", "b=[1]", "c=x"]) == {"a": deep, "b": [1], "c": "x"}
