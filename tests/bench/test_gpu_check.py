# SPDX-License-Identifier: Apache-2.0
"""gpu-check without a GPU: it says so and writes nothing; results become a table and an exit code; children may die."""

import json
import os
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import pytest

from bench.gpu_check import checks, child, decoding, main, report
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
    monkeypatch.setattr(main, "run_child", lambda name, *given: held.get(name) or held[name.partition(".")[0]])
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
    assert "| tensorrt.speed | not run | none installed |" in text
    assert "| ort-cuda.tokens | failed | wrong: equal |" in text
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
        ({"ort-cuda.wide": PASSED, "ort-cuda": FAILED}, ("--sections", "ort-cuda.wide", "--quick"), 0),
    ],
)
def test_the_exit_code_says_what_became_of_what_was_asked_for(monkeypatch, tmp_path, results, arguments, code):
    monkeypatch.setattr(main, "write_environment", lambda work: None)  # four child processes
    assert run_main(monkeypatch, tmp_path, results, *arguments) == code


def test_a_section_that_is_not_there_is_named(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_main(monkeypatch, tmp_path, {}, "--sections", "kernels,ort_cuda")
    assert (
        "got 'ort_cuda'; expected some of kernels, ort-cuda, tensorrt, tensorrt-rtx, or a part: ort-cuda.tokens"
        in capsys.readouterr().err
    )


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


def test_every_part_is_a_method_of_its_subject_and_says_where_it_cannot_run(monkeypatch, tmp_path):
    for section in main.SECTIONS:
        backend, _, part = section.partition(".")
        assert backend == "kernels" or callable(getattr(child.subject_of(backend), part))
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    held = child.run_part("ort-cuda.wide", tmp_path)
    assert held["status"] == "not run" and "has no CUDA provider: run make gpu-env" in held["reason"]


def test_a_quick_run_does_less(monkeypatch):
    modules, before = {"decoding": decoding, "checks": checks}, {}
    for module, sizes in child.QUICK.items():
        for name in sizes:
            before[module, name] = size = getattr(modules[module], name)
            monkeypatch.setattr(modules[module], name, size)  # as it was after the test
    child.shorten()
    assert before and all(getattr(modules[module], name) < size for (module, name), size in before.items())
    rows = decoding.golden_rows()
    assert len(rows) == decoding.NUM_PROMPTS and {len(r["tokens"]) for r in rows} == {decoding.NUM_TOKENS}


class Told:
    """A reference that knows the gap."""

    model = None

    def __init__(self, gap):
        self._gap = gap

    def gap(self, prompt, text):
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


def test_a_text_that_ends_early_is_no_tie(monkeypatch):
    for wanted, got in (([2, 3], [2]), ([2], [2, 3]), ([2], [])):
        assert decoding.gap_of(Told(0.0), [1], wanted, got) == float("inf")
    assert decoding.gap_of(Told(0.25), [1], [2, 3], [2, 4]) == 0.25


@pytest.mark.export
def test_a_gap_is_the_most_over_all_tokens_of_a_text():
    torch = pytest.importorskip("torch")
    reference = decoding.Reference.__new__(decoding.Reference)
    logits = torch.tensor([[[9.0, 0, 0], [1, 3, 0], [0, 4, 3.5], [7, 0, 0]]])
    reference.model = lambda ids, use_cache: types.SimpleNamespace(logits=logits[:, : ids.shape[1]])
    reference.device = "cpu"
    assert reference.gap([0, 0], [1, 1]) == 0.0
    assert reference.gap([0, 0], [0, 2]) == 2.0
    assert reference.gap([0, 0], [1, 2]) == 0.5


def test_without_torch_no_text_that_differs_is_a_tie(monkeypatch):
    monkeypatch.setattr(decoding.importlib.util, "find_spec", lambda name: None)
    reference = decoding.Reference()
    assert reference.model is None and reference.gap([1], [2]) == float("inf")
