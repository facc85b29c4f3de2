# SPDX-License-Identifier: Apache-2.0
"""The scripts of bench/peers, with peers that answer what a test wants: nothing is installed and nothing is fetched."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
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

def logits(job):
    for text in job["texts"]:
        yield [[10 * at + token for token in range(2)] for at in range(len(text))]

main(Peer(packages=("pip",), forms={{"fp32": "f32"}}, modes=("plain",), convert=convert, load=load, logits=logits))
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


def test_a_worker_writes_the_rows_that_predict_each_answer(peer, tmp_path):
    job = {"texts": [[5, 6, 7, 8], [1, 2]], "starts": [2, 1], "out": str(tmp_path / "x.npz")}
    peer("logits", text=json.dumps(job))
    with np.load(tmp_path / "x.npz") as held:
        assert [held[name].tolist() for name in sorted(held.files)] == [[[10, 11], [20, 21]], [[0, 1]]]


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
    from bench.peers.peers import PEERS

    install = module("install")
    assert tuple(install.WORKERS) == PEERS
    for name, worker in install.WORKERS.items():
        assert (FOLDER / worker).is_file()
        lines = (FOLDER / "requirements" / f"{name}.txt").read_text().splitlines()
        assert all("==" in line for line in lines if not line.startswith("#"))


def report(busy=False):
    """Returns what `compare` returns of two engines and two kinds of text."""
    speeds = {("speccompile", "plain"): 100.0, ("speccompile", "ngram"): 150.0, ("llama.cpp", "plain"): 80.0}

    def row(engine, mode):
        return {"name": f"{engine} {mode}", "engine": engine, "precision": "int8", "form": "Q8_0", "mode": mode,
                "tokens_per_s": speeds[engine, mode], "tokens_per_s_spread": 3.0, "tokens_per_s_all": [1.0],
                "first_token_ms": 12.4, "outside_engine_share": 0.2 if engine == "llama.cpp" else 0.01}  # fmt: skip

    rows = [row(*key) for key in speeds]
    groups = {
        kind: {"modes": {r["name"]: {"tokens_per_s": r["tokens_per_s"] * factor} for r in rows}}
        for kind, factor in (("code", 1.0), ("rewriting", 1.5))
    }
    environment = {"cpu": "C", "num_cores": 2, "threads": 2, "num_prompts": 3, "max_new_tokens": 4, "repeats": 5,
                   "versions": {"speccompile": "0"}, "load_average_before": [0.2, 0, 0], "load_average_after": None,
                   "bundle": "/here"}  # fmt: skip
    peers = {"rows": rows, "versions": {"llama.cpp": {"llama-cpp-python": "1"}}, "left_out": {"openvino": "no\nroom"}}
    return {"environment": environment, "by_category": groups, "peers": peers, "warnings": ["x"] if busy else []}


@pytest.fixture
def result(tmp_path, monkeypatch):
    """Returns what compare.py writes of two bundles, the second measured beside other work."""
    compare, reports = module("compare"), [report(), report(busy=True)]
    monkeypatch.setattr(compare, "compare", lambda *_: reports.pop(0))
    file = tmp_path / "new" / "x.json"
    compare.main(["a", "b", "--model", "M, Q8_0", "--out", str(file), "--repeats", "5"])
    return json.loads(file.read_text())


DISTANCE = {"kl": 3.3e-3, "top1": 0.967, "perplexity_change": 0.003, "perplexity_error": 0.002}
QUALITY = {"num_positions": 2048, "rows": {"speccompile int8": DISTANCE}}


@pytest.mark.export
def test_distances_are_of_the_answers_alone_and_rows_of_padded_vocabularies_are_cut():
    from bench.peers import quality

    rng = np.random.default_rng(0)
    answers = [quality.Answer([1, 2, 0, 3], 2), quality.Answer([4, 4, 1], 1)]
    wanted = [answer.rows(rng.normal(size=(len(answer.tokens), 5))) for answer in answers]
    assert [len(rows) for rows in wanted] == [2, 2]
    padded = [np.pad(rows, ((0, 0), (0, 3)), constant_values=9) for rows in wanted]
    same = quality.distance(answers, wanted, padded)
    assert same.kl < 1e-12 and (same.top1, same.num_positions) == (1, 4) and abs(same.perplexity_change) < 1e-12
    pairs = zip(answers, wanted, strict=True)
    worse = [rows - 1.0 * (np.arange(5) == np.array(a.tokens[a.start :])[:, None]) for a, rows in pairs]
    assert quality.distance(answers, wanted, worse).perplexity_change > 0.1


def test_a_comparison_keeps_rows_by_kind_and_no_paths_of_the_machine(result):
    assert (
        result["command"].endswith("x.json --repeats 5") and result["model"] == "M, Q8_0" and len(result["runs"]) == 2
    )
    run = result["runs"][0]
    assert run["rows"][1]["by_kind"] == {"code": 150.0, "rewriting": 225.0} and "/here" not in json.dumps(result)
    assert "tokens_per_s_all" not in run["rows"][0] and run["left_out"] == {"openvino": "no\nroom"}


def test_the_page_has_a_line_for_each_engine_with_quality_beside_speed(result):
    page = module("page")
    result["runs"].pop()
    lines = page.block(result, QUALITY).splitlines()
    ours = "| speccompile | Q8_0 | 100 ±3 | 150 ±3, lookup | 150 | 225 | 12 | 3.3e-03 | 96.7% | +0.3 ±0.2 % |"
    assert ours in lines
    assert "| llama.cpp | Q8_0 | 80 ±3 | 80 ±3 | 80 | 120 | 12 | not run | not run | not run |" in lines
    text = " ".join(lines)
    assert "2.50 ms of a plain token are the binding's" in text and "would make 100 tokens/s" in text
    assert "M, Q8_0; " in text and "C, 2 threads" in text and "llama-cpp-python 1" in text
    assert "Left out: openvino: no room." in text and "2048 positions" in text and "not idle" not in text
    assert max(map(len, lines)) <= 400


def test_figures_of_a_busy_machine_are_marked(result):
    assert "**The machine was not idle" in module("page").block(result, QUALITY)
    result["runs"].pop()
    assert "**The machine was not idle" not in module("page").block(result, QUALITY)


def test_the_generated_part_alone_is_replaced(tmp_path, result):
    page, file = module("page"), tmp_path / "page.md"
    file.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    page.write_page(page.block(result, QUALITY), file)
    text = file.read_text()
    assert text.startswith("before\n<!--") and text.endswith("-->\nafter\n") and "old" not in text


def test_the_plot_has_a_panel_for_each_kind(tmp_path, result):
    pytest.importorskip("matplotlib")
    module("page").draw(result, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert all(f">{word}</text>" in text for word in ("all", "code", "rewriting", "speccompile", "llama.cpp"))


def test_docs_show_what_is_kept():
    page = module("page")
    assert page.block(*page.read_results()) in page.PAGE.read_text()
