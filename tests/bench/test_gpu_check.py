# SPDX-License-Identifier: Apache-2.0
"""gpu-check without a GPU: it says so and writes nothing; results become a table and an exit code; children may die."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench.gpu_check import child, decoding, main, report
from speccompile.backends.tensorrt.import_helper import find_compute_capabilities
from speccompile.errors import RuntimeFault

ROOT = Path(__file__).parents[2]
MACHINE = {
    "name": "Fake",
    "compute_capability": [9, 0],
    "total_bytes": 8 << 30,
    "free_bytes": 8 << 30,
    "driver": 13000,
    "runtime": 13000,
}


def git_state():
    command = ["git", "status", "--porcelain", "--untracked-files=all"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_a_machine_without_cuda_gets_a_message_and_nothing_is_measured(tmp_path):
    if find_compute_capabilities():
        pytest.skip("this machine has a GPU")
    before = git_state()
    command = [sys.executable, ROOT / "bench/gpu_check/main.py", "--work", tmp_path / "work"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert "no CUDA device can be used here: RuntimeFault: " in done.stderr and "Nothing was measured" in done.stderr
    assert not list((tmp_path / "work").glob("report.*")) and git_state() == before


def test_missing_packages_are_named_before_a_device_is_asked_for(tmp_path):
    # A bare interpreter: no packages of the environment, no user's packages.
    command = [sys.executable, "-S", "-s", ROOT / "bench/gpu_check/main.py", "--work", tmp_path / "work"]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=bare)
    assert done.returncode == 2 and done.stdout == ""
    assert f"not installed in {sys.executable}: numpy, cuda-python, pydantic, tokenizers" in done.stderr
    assert "make gpu-env" in done.stderr and not (tmp_path / "work").exists()


def run_main(monkeypatch, tmp_path, results, *arguments):
    held = {"machine": {**report.result([report.row("device", "Fake")]), "machine": MACHINE}, **results}
    monkeypatch.setattr(main, "run_child", lambda name, work, limit_s: held[name])
    work = tmp_path / "work"
    (work / "logs").mkdir(parents=True)
    (work / "logs/kernels.log").write_text("a line of the log")
    (work / "bundles/pair").mkdir(parents=True)
    (work / "bundles/pair/manifest.json").write_text("{}")
    (work / "bundles/pair/weights.bin").write_text("heavy")
    return main.main(["--work", str(work), *arguments])


PASSED = report.result([report.row("tokens/s, plain", 1234.5678), report.row("equal", "72 | 72", "all", True)])
FAILED = report.result([report.row("equal", "71 of 72", "all equal", False), report.row("other", 1, "", None)])


ALL_NOT_RUN = {"tensorrt": report.not_run("none installed"), "tensorrt-rtx": report.not_run("no support")}


def test_results_become_a_table_and_one_archive(monkeypatch, tmp_path, capsys):
    assert run_main(monkeypatch, tmp_path, {"kernels": PASSED, "ort-cuda": FAILED, **ALL_NOT_RUN}) == 1
    (packed,) = (tmp_path / "work").glob("gpu-check-*.tar.gz")
    assert f"to send back: {packed}" in capsys.readouterr().out
    with tarfile.open(packed) as archive:
        found = {name.partition("/")[2]: archive.extractfile(name).read().decode() for name in archive.getnames()}
    assert {"logs/kernels.log", "bundles/pair/manifest.json", "report.md", "report.json"} <= found.keys()
    assert "bundles/pair/weights.bin" not in found
    text = found["report.md"]
    assert "- GPU: Fake, sm_90, 8 GiB" in text and "Python 3." in text
    assert "| tensorrt | not run | none installed |" in text
    assert "| ort-cuda | failed | wrong: equal |" in text
    assert "| kernels | tokens/s, plain | 1235 |  |  |" in text
    assert "| kernels | equal | 72 / 72 | all | ok |" in text and "| all equal | WRONG |" in text
    assert json.loads(found["report.json"])["results"]["kernels"]["rows"][0]["got"] == 1234.5678
    # What a reader needs to judge the figures; a program that is not installed is said to be so.
    assert found["environment/nvidia-smi.txt"].startswith("$ nvidia-smi -q\n")
    assert "git rev-parse HEAD" in found["environment/commit.txt"]
    assert "numpy==" in found["environment/packages.txt"] or "pip" in found["environment/packages.txt"]


@pytest.mark.parametrize(
    ("results", "arguments", "code"),
    [
        ({"kernels": PASSED, "ort-cuda": PASSED, "tensorrt": PASSED, "tensorrt-rtx": PASSED}, (), 0),
        ({"kernels": PASSED, "ort-cuda": PASSED, **ALL_NOT_RUN}, (), 0),
        ({"tensorrt": report.not_run("x")}, ("--sections", "tensorrt"), 3),
        ({"kernels": FAILED, "tensorrt": report.not_run("x")}, ("--sections", "kernels", "tensorrt"), 1),
        ({"kernels": PASSED, "tensorrt": report.not_run("x")}, ("--sections", "kernels,tensorrt"), 3),
        ({"kernels": PASSED, "ort-cuda": FAILED}, ("--sections", "kernels,", "ort-cuda"), 1),
        ({"kernels": report.result([])}, ("--sections", "kernels"), 1),
    ],
)
def test_the_exit_code_says_what_became_of_what_was_asked_for(monkeypatch, tmp_path, results, arguments, code):
    assert run_main(monkeypatch, tmp_path, results, *arguments) == code


def test_a_section_that_is_not_there_is_named(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_main(monkeypatch, tmp_path, {}, "--sections", "kernels,ort_cuda")
    assert "got 'ort_cuda'; expected some of kernels, ort-cuda, tensorrt, tensorrt-rtx" in capsys.readouterr().err


def test_the_report_names_the_package_that_has_cudas_bindings(monkeypatch):
    monkeypatch.setattr(main.importlib.metadata, "version", dict.fromkeys(main.PACKAGES, "1").__getitem__)
    assert "cuda-bindings 1" in main.facts_of(MACHINE)["software"]


def test_a_child_that_dies_or_hangs_leaves_a_result(tmp_path):
    died = main.run_child("no such section", tmp_path, 60)
    assert died["status"] == "failed" and "exit code 1" in died["reason"] and "KeyError" in died["reason"]
    hung = main.run_child("machine", tmp_path, 0.01)
    assert hung["status"] == "failed" and "no end after 0 s" in hung["reason"]


def test_faults_and_missing_packages_of_a_child_are_results(monkeypatch, tmp_path):
    def fault(work):
        raise RuntimeFault("cuda:0", "no device", "one", "Get one.")

    def missing(work):
        raise ModuleNotFoundError("No module named 'x'", name="x")

    for section, function, status, words in (
        ("kernels", fault, "failed", "RuntimeFault: cuda:0: got no device"),
        ("tensorrt", missing, "not run", "no package x: run make gpu-env"),
    ):
        answer = tmp_path / "answer.json"
        monkeypatch.setitem(child.SECTIONS, section, function)
        monkeypatch.setattr(sys, "argv", ["child", section, str(tmp_path), str(answer)])
        child.main()
        held = json.loads(answer.read_text())
        assert held["status"] == status and words in held["reason"]


def test_a_section_may_leave_out_what_follows_from_its_rows():
    rows = [{"what": "error", "got": 3, "expected": "0", "ok": False}, {"what": "GB/s", "got": 900.0}]
    held = report.completed({"rows": rows, "extra": 1})
    assert held["status"] == "failed" and held["reason"] == "wrong: error" and held["extra"] == 1
    assert held["rows"][1] == {"what": "GB/s", "got": 900.0, "expected": "", "ok": None}
    assert report.completed({"status": "not run", "reason": "why"})["status"] == "not run"


class Told:
    """A reference that knows the gap."""

    model = None

    def __init__(self, gap):
        self._gap = gap

    def gap(self, prompt, wanted, got):
        return self._gap


def test_equality_distinguishes_ties_from_faults(monkeypatch):
    wanted = [{"prompt_ids": [1], "tokens": [2, 3]}, {"prompt_ids": [4], "tokens": [5]}]

    class Engine:
        def generate(self, prompts, params, batch_size):
            return [type("R", (), {"tokens": [2, 9]}), type("R", (), {"tokens": [5]})]

    monkeypatch.setattr(decoding.speccompile, "load", lambda bundle, method: Engine())
    for gap, is_right in ((1e-5, True), (0.3, False), (float("inf"), False)):
        rows = decoding.equality_rows(Path("b"), wanted, Told(gap), 1e-3)
        assert len(rows) == 6 and all(r["ok"] is is_right for r in rows)
        assert rows[0]["got"].startswith("1 of 2 prompts equal, the others part at gaps of up to ")


def test_without_torch_the_golden_tokens_are_the_reference(monkeypatch):
    monkeypatch.setattr(decoding.importlib.util, "find_spec", lambda name: None)
    reference = decoding.Reference()
    assert reference.model is None and reference.gap([1], [2], [3]) == float("inf")
    assert decoding.reference_rows(reference) == decoding.golden_rows()
