# SPDX-License-Identifier: Apache-2.0
"""The scripts of bench/peers, with peers that answer what a test wants: nothing is installed and nothing is fetched."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench/peers"

# A peer of 3 tokens a step, whose end token is 9.
PEER = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
from peer_process import Peer, Steps, main

def load(job):
    def decode(prompt, most):
        print("noise")
        steps = Steps()
        steps.add([prompt[0]])
        steps.add([7, 9, 8])
        return steps
    return {{mode: decode for mode in job["modes"]}}

def convert(source, dest, form):
    dest.mkdir()
    (dest / form).write_text(source.name)

main(Peer(packages=("pip",), forms={{"fp32": "f32"}}, modes=("plain",), convert=convert, load=load))
"""


def module(name):
    spec = importlib.util.spec_from_file_location(f"peers_{name}", FOLDER / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def peer(tmp_path):
    file = tmp_path / "peer.py"
    file.write_text(PEER)

    def call(*arguments, text=""):
        command = [sys.executable, str(file), *map(str, arguments)]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout

    return call


def test_a_worker_describes_itself_and_converts(peer, tmp_path):
    described = json.loads(peer("describe"))
    assert described["forms"] == {"fp32": {"name": "f32", "modes": ["plain"]}} and described["needs_draft"] == []
    assert "pip" in described["versions"]
    peer("convert", tmp_path, tmp_path / "made", "fp32")
    assert (tmp_path / "made/fp32").read_text() == tmp_path.name


def test_a_worker_answers_in_lines_and_ends_texts_at_the_end_token(peer):
    job = {"modes": ["plain"], "prompts": [[5], [6]], "max_new_tokens": 8, "eos_token_ids": [9]}
    ready, result = peer(text=json.dumps(job) + '\n["plain", 1]\n').splitlines()
    assert json.loads(ready) == {"ready": True}
    result = json.loads(result)
    assert result["tokens"] == [6, 7, 9] and result["num_steps"] == 2 and result["num_accepted"] == 1
    assert 0 <= result["prefill_s"] <= result["total_s"] and result["outside_s"] is None
    assert result["prefill_s"] <= result["first_token_s"] <= result["total_s"]


def test_what_cannot_be_installed_is_recorded_with_its_reason(tmp_path, monkeypatch, capsys):
    install = module("install")

    def fail(name, folder):
        if name == "llama.cpp":
            raise SystemExit("no compiler")
        return {"python": "p", "worker": "w", "forms": {}, "versions": {"x": "1"}}

    monkeypatch.setattr(install, "install", fail)
    assert install.main(["llama.cpp", "openvino", "--folder", str(tmp_path)]) == 0
    assert "llama.cpp: left out: no compiler" in capsys.readouterr().out
    assert json.loads((tmp_path / "llama.cpp/peer.json").read_text()) == {"failed": "no compiler"}
    assert json.loads((tmp_path / "openvino/peer.json").read_text())["versions"] == {"x": "1"}
    assert install.main(["llama.cpp", "--folder", str(tmp_path)]) == 1
    with pytest.raises(SystemExit):
        install.main(["vllm", "--folder", str(tmp_path)])


def test_a_command_that_fails_gives_the_end_of_its_log(tmp_path):
    install = module("install")
    code = "import sys; print('much'); sys.exit('no compiler')"
    with pytest.raises(SystemExit, match="no compiler"):
        install._run([sys.executable, "-c", code], tmp_path / "log")
    assert "much" in (tmp_path / "log").read_text()


def test_every_peer_has_a_worker_and_pinned_packages():
    from speccompile.cli.bench_peers import PEERS

    install = module("install")
    assert tuple(install.WORKERS) == PEERS
    for name, worker in install.WORKERS.items():
        assert (FOLDER / worker).is_file()
        lines = (FOLDER / "requirements" / f"{name}.txt").read_text().splitlines()
        assert all("==" in line for line in lines if not line.startswith("#"))


def report(precision):
    def row(engine, mode, speed):
        return {"engine": engine, "precision": precision, "form": "F", "mode": mode, "tokens_per_s": speed,
                "first_token_ms": 12.0, "of_ours": None, "of_plain": None, "of_plain_spread": None, "num_equal": None,
                "tokens_per_s_spread": None}  # fmt: skip

    environment = {"bundle": "b", "cpu": "C", "threads": 2, "num_prompts": 3, "max_new_tokens": 4, "repeats": 5,
                   "versions": {"speccompile": "0"}}  # fmt: skip
    rows = [row("speccompile", "plain", 10.0), row("speccompile", "draft_model", 20.0), row("openvino", "plain", 5.0)]
    peers = {"precision": precision, "rows": rows, "versions": {"openvino": {"openvino-genai": "1"}}}
    reference = {"versions": {"transformers": "5"}}
    peers["left_out"] = {"llama.cpp": "no\ncompiler"}
    return {"environment": environment, "reference": reference, "peers": peers}


def test_a_comparison_names_machine_versions_and_what_is_left_out():
    text = module("compare").markdown_from_reports([report("fp32"), report("int8")])
    assert "b (fp32), C, 2 threads, 3 prompts, 4 new tokens, medians of 5 interleaved rounds with half of" in text
    assert "texts: equal to those of transformers 5 in float32; speccompile 0 (here)" in text
    assert "speccompile 0 (here), openvino-genai 1 (openvino)." in text and "Left out: llama.cpp: no compiler" in text
    assert text.count("| speccompile | int8 | F | draft_model | 20.0 |") == 1


def test_the_plot_has_a_panel_for_each_report(tmp_path):
    pytest.importorskip("matplotlib")
    module("compare").plot([report("fp32"), report("int8")], tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert all(f">{word}</text>" in text for word in ("fp32", "int8", "ngram", "speccompile", "openvino"))
