# SPDX-License-Identifier: Apache-2.0
"""Other engines in a benchmark, with workers that are small scripts: nothing is installed and nothing is fetched."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from bench.peers import peers as peers_module
from bench.peers.peers import (
    Peer,
    comparison_rows,
    convert_checkpoint,
    jobs_of_peers,
    peer_jobs,
    precision_from_bundle,
    print_rows,
    read_peers,
    read_precisions,
    source_of,
)
from speccompile.benchmark.rounds import open_workers, run_rounds
from speccompile.benchmark.summary import summary_from_runs
from speccompile.bundle.manifest_records import TargetRecord
from speccompile.errors import BuildError, RuntimeFault

# Answers with the form that it was converted to; "16bit" cannot be converted, and "int4" cannot be loaded.
WORKER = """
import json, os, pathlib, sys
if sys.argv[1:2] == ["convert"]:
    source, dest, form = sys.argv[2:]
    if form == "16bit":
        sys.exit("no bfloat16 here")
    os.mkdir(dest)
    config = pathlib.Path(source, "config.json")
    pathlib.Path(dest, "form").write_text(form + " " + (source if form == "stored" else config.read_text()))
    sys.exit()
job = json.loads(sys.stdin.readline())
form, model = pathlib.Path(job["target"], "form").read_text().split()
if form == "int4":
    sys.exit("no such kernel")
assert job["form"] == form and "PYTHONPATH" not in os.environ and "command" not in job
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    mode, prompt = json.loads(line)
    seconds = {"plain": 0.5, "draft_model": 0.25, "ngram": 0.1}[mode]
    last = [9] if mode == "plain" else []
    print(json.dumps({"tokens": [1, 2, 3, 4 + (form == "int8" and prompt)] + last, "total_s": 4 * seconds + 1,
                      "prefill_s": 1, "first_token_s": 1.5, "num_steps": 4, "num_accepted": 0, "outside_s": None,
                      "peak_rss_bytes": 5}),
          flush=True)
"""
FORMS = {p: {"name": p.upper(), "modes": ["plain", "draft_model", "ngram"]} for p in peers_module.PRECISIONS}


@pytest.fixture
def folder(tmp_path):
    """Returns the folder of two environments: one that works, and one whose installation failed."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    works = {
        "python": sys.executable,
        "worker": str(worker),
        "forms": FORMS,
        "needs_draft": ["draft_model"],
        "versions": {"openvino-genai": "1"},
    }
    for name, found in {"openvino": works, "llama.cpp": {"failed": "no compiler"}}.items():
        (tmp_path / "peers" / name).mkdir(parents=True)
        (tmp_path / "peers" / name / "peer.json").write_text(json.dumps(found))
    return tmp_path / "peers"


@pytest.fixture
def checkpoint(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    return made


@pytest.fixture
def job(checkpoint, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    return {"modes": [], "prompts": [[1], [2]], "max_new_tokens": 4, "threads": 1, "target": str(checkpoint),
            "draft": str(checkpoint), "assistant_tokens": 4, "eos_token_ids": [9]}  # fmt: skip


def test_all_are_those_that_were_tried_and_failures_are_named(folder):
    peers, left_out = read_peers("all", folder)
    assert [peer.name for peer in peers] == ["openvino"]
    assert left_out == {"llama.cpp": "could not be installed: no compiler"}
    assert [peer.name for peer in read_peers(" openvino ", folder)[0]] == ["openvino"]


@pytest.mark.parametrize("wanted", ["vllm", "openvino,openvino", ",", "openvino,all"])
def test_a_wrong_list_of_peers_is_refused(folder, wanted):
    with pytest.raises(RuntimeFault, match=r"some of openvino, ort-genai, llama\.cpp, transformers, each once"):
        read_peers(wanted, folder)


def test_a_peer_without_an_environment_names_make_peers(folder, tmp_path):
    with pytest.raises(RuntimeFault) as caught:
        read_peers("openvino,ort-genai", folder)
    error = caught.value
    assert error.where == "--peers ort-genai" and str(folder / "ort-genai") in error.got
    assert error.expected == "one that `make peers` made" and "`make peers PEERS=ort-genai`" in error.todo
    with pytest.raises(RuntimeFault, match="make peers"):
        read_peers("all", tmp_path / "none")
    (tmp_path / "worker.py").unlink()
    with pytest.raises(RuntimeFault, match="that is gone"):
        read_peers("openvino", folder)


def test_a_checkpoint_is_converted_once_and_again_when_it_changed(folder, checkpoint):
    [peer], _ = read_peers("openvino", folder)
    first = convert_checkpoint(peer, "int8", checkpoint, folder / "models")
    assert (first / "form").read_text() == "int8 {}"
    (first / "form").write_text("kept")
    assert convert_checkpoint(peer, "int8", checkpoint, folder / "models") == first
    assert (first / "form").read_text() == "kept"
    (checkpoint / "config.json").write_text('{"hidden":1}')
    second = convert_checkpoint(peer, "int8", checkpoint, folder / "models")
    assert second != first and (second / "form").read_text() == 'int8 {"hidden":1}'


def test_a_conversion_that_fails_says_why_and_leaves_nothing(folder, checkpoint):
    [peer], _ = read_peers("openvino", folder)
    with pytest.raises(BuildError, match=r"openvino 16bit, conversion of .*exit code 1: no bfloat16 here"):
        convert_checkpoint(peer, "16bit", checkpoint, folder / "models")
    assert not list((folder / "models").iterdir())


@pytest.fixture
def gguf(folder, monkeypatch):
    """Returns a GGUF file; what converts it to float32 writes a checkpoint that says so."""
    real = subprocess.run

    def run(command, **options):
        if command[1:4] == ["-m", "speccompile", "convert"]:
            made = Path(command[-1])
            made.mkdir()
            (made / "config.json").write_text(f'"float32-of-{Path(command[4]).name}"')
            return subprocess.CompletedProcess(command, 0)
        return real(command, **options)

    monkeypatch.setattr(peers_module.subprocess, "run", run)
    (folder / "m.gguf").write_bytes(b"GGUF")
    return folder / "m.gguf"


def test_of_a_gguf_file_stored_is_the_file_and_other_forms_are_made_of_its_values(folder, gguf):
    [peer], _ = read_peers("openvino", folder)
    made = convert_checkpoint(peer, "stored", gguf, folder / "models")
    assert (made / "form").read_text() == f"stored {gguf}"
    made = convert_checkpoint(peer, "int8", gguf, folder / "models")
    assert (made / "form").read_text() == 'int8 "float32-of-m.gguf"'
    kept = sorted(path.name for path in (folder / "models").iterdir())
    assert convert_checkpoint(peer, "int8", gguf, folder / "models") == made
    assert sorted(path.name for path in (folder / "models").iterdir()) == kept and len(kept) == 3


def test_a_folder_with_a_gguf_file_alone_is_that_file(folder, gguf, checkpoint, job):
    (folder / "held").mkdir()
    gguf.rename(folder / "held" / "m.gguf")
    assert source_of(str(folder / "held")) == folder / "held" / "m.gguf"
    [stored] = peer_jobs(
        read_peers("openvino", folder)[0], ["stored"], {**job, "target": str(folder / "held")}, folder, {}
    )
    assert (Path(stored["target"]) / "form").read_text() == f"stored {folder}/held/m.gguf"
    (folder / "held" / "model.safetensors").touch()
    assert source_of(str(folder / "held")) == folder / "held"


def test_what_is_no_gguf_file_has_no_stored_form(folder, job):
    peers, left_out = read_peers("openvino", folder)
    assert peer_jobs(peers, ["stored"], job, folder / "models", left_out) == []
    assert left_out["openvino stored"] == "the checkpoint is no GGUF file"


def test_peers_take_turns_and_what_does_not_work_is_left_out(folder, job):
    peers, left_out = read_peers("openvino", folder)
    jobs = peer_jobs(peers, peers_module.PRECISIONS, job, folder / "models", left_out)
    assert [j["prefix"] for j in jobs] == ["openvino fp32 ", "openvino int8 ", "openvino int4 "]
    with open_workers(jobs, lambda j, error: left_out.update({j["prefix"].strip(): str(error)})) as workers:
        turns = []
        runs = run_rounds(workers, 2, 1, turns.append)
    modes = [f"openvino {p} {m}" for p in ("fp32", "int8") for m in ("plain", "draft_model", "ngram")]
    assert list(runs) == modes and turns == [*modes, *modes[1:], modes[0]]
    assert "no bfloat16 here" in left_out["openvino 16bit"] and "no such kernel" in left_out["openvino int4"]


def test_a_job_that_is_not_optional_ends_the_run(folder, job):
    peers, _ = read_peers("openvino", folder)
    jobs = [{**j, "optional": False} for j in peer_jobs(peers, ["int4"], job, folder / "models", {})]
    with pytest.raises(RuntimeFault, match="no such kernel"), open_workers(jobs, lambda *_: None):
        pass


def test_without_a_draft_model_no_peer_drafts_with_one(folder, job):
    peers, left_out = read_peers("openvino", folder)
    [one] = peer_jobs(peers, ["fp32"], {**job, "draft": None}, folder / "models", left_out)
    assert one["modes"] == ["plain", "ngram"] and one["draft"] is None and not left_out


def test_a_precision_that_a_peer_lacks_is_named(folder, job):
    peers, left_out = read_peers("openvino", folder)
    poor = Peer("openvino", peers[0].python, peers[0].worker, {"fp32": FORMS["fp32"]}, [], {})
    assert peer_jobs([poor], ["int8"], job, folder / "models", left_out) == []
    assert left_out == {"openvino int8": "the peer has no such form"}


def run_of(tokens, seconds):
    return [{"tokens": tokens, "total_s": len(tokens) * seconds + 1, "prefill_s": 1, "num_steps": 1, "num_accepted": 0,
             "first_token_s": seconds / 10, "outside_s": None, "peak_rss_bytes": 5}] * 2  # fmt: skip


@pytest.fixture
def rows(folder):
    peers, _ = read_peers("openvino", folder)
    runs = {
        "transformers": [run_of([1, 2, 3, 4, 9], 1.0)],
        "plain": [run_of([1, 2, 3, 4], 0.25)],
        "speculative": [run_of([1, 2, 3, 4], 0.125)],
        "ngram plain": [run_of([1, 2, 3, 4], 0.2)],
        "ngram speculative": [run_of([1, 2, 3, 4], 0.1)],
        "openvino fp32 plain": [run_of([1, 2, 3, 4, 9], 0.5)],
        "openvino int8 draft_model": [run_of([1, 2, 3, 5], 0.5)],
        "openvino int8 plain": [run_of([1, 2, 3, 5], 0.2)],
    }
    modes = summary_from_runs(runs, [[1, 2, 3, 4, 9], [1, 2, 3, 6]], [9])["modes"]
    return {
        (row["engine"], row["precision"], row["mode"]): row
        for row in comparison_rows(modes, "draft_model", "int8", peers)
    }


def test_rows_compare_with_our_mode_of_the_same_precision(rows):
    assert [key[:2] for key in rows][:2] == [("transformers, here", "fp32"), ("openvino", "fp32")]
    assert rows["openvino", "int8", "plain"]["of_ours"] == pytest.approx(1.25)
    assert rows["openvino", "int8", "draft_model"]["of_ours"] == pytest.approx(0.25)
    assert rows["speccompile", "int8", "draft_model"]["of_ours"] == 1
    assert rows["openvino", "fp32", "plain"]["of_ours"] is None


def test_rows_compare_with_plain_decoding_of_their_own_process(rows):
    ours = [key[2] for key in rows if key[0] == "speccompile"]
    assert ours == ["plain", "draft_model", "ngram"]  # of plain decoding one row
    plain = rows["speccompile", "int8", "plain"]
    assert plain["tokens_per_s"] == 4 and plain["of_plain"] is None
    assert rows["speccompile", "int8", "draft_model"]["of_plain"] == 2
    assert rows["speccompile", "int8", "ngram"]["of_plain"] == pytest.approx(2)  # not 2.5, of the other process
    assert rows["openvino", "int8", "draft_model"]["of_plain"] == pytest.approx(0.4)
    assert rows["transformers, here", "fp32", "plain"]["of_plain"] is None


def test_texts_of_every_engine_are_compared_with_the_reference(rows):
    equal = {key: (row["num_equal"], row["num_texts"], row["mean_first_difference"]) for key, row in rows.items()}
    assert equal["speccompile", "int8", "plain"] == (1, 2, 3)  # not with plain decoding of its own precision
    assert equal["openvino", "fp32", "plain"] == (1, 2, 3)  # an end token that an engine leaves out does not count
    assert equal["openvino", "int8", "plain"] == (0, 2, 3)


@pytest.mark.parametrize(
    ("quantization", "form", "dtype", "precision"),
    [("int8", "packed", "bfloat16", "int8"), ("int4", "blocks32", None, "int4"), ("none", "fp32", "bfloat16", "fp32"),
     ("none", "packed", "bfloat16", "16bit"), ("none", "packed", "float32", "fp32"), ("none", "packed", None, "fp32")],
)  # fmt: skip
def test_the_precision_of_a_bundle_is_that_of_its_weights(checkpoint, quantization, form, dtype, precision):
    (checkpoint / "config.json").write_text(json.dumps({} if dtype is None else {"dtype": dtype}))
    bundle = SimpleNamespace(
        manifest={"recipe": {"target": {"quantization": quantization}}},
        graphs={"target": {"form": form}},
        recipe=SimpleNamespace(target=TargetRecord(model=str(checkpoint))),
    )
    assert precision_from_bundle(bundle) == precision
    assert read_precisions(None, bundle) == [precision]
    assert read_precisions("int4, fp32,int4", bundle) == ["int4", "fp32"]
    with pytest.raises(RuntimeFault, match="expected some of stored, fp32, 16bit, int8, int4"):
        read_precisions("fp8", bundle)


@pytest.mark.parametrize("target", [TargetRecord(model="/gone"), TargetRecord(), TargetRecord(weights="random")])
def test_a_bundle_without_its_checkpoint_cannot_be_compared(tmp_path, target):
    bundle = SimpleNamespace(recipe=SimpleNamespace(target=target, method="none"))
    with pytest.raises(RuntimeFault, match="no trained checkpoint's folder at"):
        jobs_of_peers(bundle, [], None, {}, tmp_path, {})


def test_the_table_has_a_row_for_each_mode_and_nothing_is_cut_in_80_columns():
    names = ("plain", "speculative", "ngram speculative", "openvino 16bit draft_model", "llama.cpp int8 plain")
    modes = summary_from_runs({name: [run_of([1] * 50, 0.03), run_of([1] * 50, 0.04)] for name in names})["modes"]
    modes["llama.cpp int8 plain"]["outside_engine_share"] = 0.001
    forms = {name: {"name": name.upper()} for name in peers_module.PRECISIONS}
    peers = [Peer(name, "", "", forms, [], {}) for name in ("openvino", "llama.cpp")]
    out = io.StringIO()
    print_rows(Console(file=out, width=80), comparison_rows(modes, "hybrid", "int8", peers), peers, None)
    table, note, text = out.getvalue().partition("weights: ")
    rows = [" ".join(line.split()) for line in table.splitlines()]
    assert "…" not in table and all(len(line) <= 80 for line in table.splitlines()) and note
    for name in ("speccompile int8 plain", "speccompile int8 hybrid", "speccompile int8 ngram",
                 "openvino 16bit draft_model", "llama.cpp int8 plain"):  # fmt: skip
        assert sum(row.startswith(f"{name} ") for row in rows) == 1, name
    assert text.startswith("openvino 16bit has 16BIT, llama.cpp int8 has INT8\n")
    assert "\nllama.cpp int8 plain: 0.03 ms of a token are outside of the engine\n" in text  # 1 ‰ at 28.6 tokens/s
