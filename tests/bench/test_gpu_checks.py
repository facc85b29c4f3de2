# SPDX-License-Identifier: Apache-2.0
"""What gpu-check asks of bundles besides tokens: each check passes on what is right and fails on what is not."""

import types

import pytest

from bench.gpu_check import checks
from bench.server_soak import main as soak_main
from bench.server_soak import serve
from tests.bench.test_server_soak import TASKS, FakeServer


class Engine:
    """Loses some memory of its device with every call, and takes some time for its first tokens."""

    def __init__(self, device, lost=0):
        self.device, self.lost, self.batches = device, lost, []

    def generate(self, prompts, params, batch_size):
        self.device.free -= self.lost
        self.batches.append(batch_size)
        return []


class Device:
    free = 1 << 30

    def memory_bytes(self):
        return self.free, 1 << 31


@pytest.mark.parametrize(("lost", "is_right"), [(0, True), (1 << 10, True), (1 << 17, False)])
def test_memory_that_goes_with_requests_is_seen(lost, is_right):
    device = Device()
    engine = Engine(device, lost)
    row = checks.memory_row(device, engine, [[1], [2]])
    assert row["ok"] is is_right and str(device.free) in row["got"]
    assert sum(engine.batches) >= checks.NUM_REQUESTS + checks.NUM_WARM and set(engine.batches) == {1, 3, 8}


@pytest.mark.parametrize(("seconds", "is_right"), [((9.0, 1.0), True), ((1.0, 9.0), False)])
def test_a_second_load_that_is_slower_is_seen(seconds, is_right, monkeypatch, tmp_path):
    clock, waits, cleared = [0.0], iter(seconds), []

    def generate(prompts, params):
        clock[0] += next(waits)

    monkeypatch.setattr(checks.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(checks.speccompile, "load", lambda path: types.SimpleNamespace(generate=generate))
    (row,) = checks.loading_rows(tmp_path, [1], lambda: cleared.append(True))
    assert row["ok"] is is_right and cleared == [True]
    assert row["got"] == f"{seconds[0]:.2f} s, again {seconds[1]:.2f} s"


@pytest.mark.parametrize(("without", "is_right"), [(2.0, True), (0.5, False)])
def test_graphs_that_bring_nothing_are_seen(without, is_right, monkeypatch, tmp_path):
    times = {"with": [1.0, 1.1, 0.9], "without": [without] * 3}
    monkeypatch.setattr(checks, "_ms_per_token", lambda engines, prompts: {name: times[name] for name in engines})
    monkeypatch.setattr(checks.speccompile, "load", lambda path, method: str(path))
    edits = []
    monkeypatch.setattr(checks, "edited_copy", lambda bundle, dest, edit: edits.append(edit) or dest)
    (row,) = checks.own_capture_rows(tmp_path, tmp_path / "off", [[1]])
    assert row["ok"] is is_right and f"(x{without:.2f})" in row["got"]
    manifest = {"graphs": {"target": {"tuning": {"steps": 1}}, "draft": {}}}
    edits[0](manifest)
    assert manifest["graphs"]["target"]["tuning"] == {"steps": 1, "cuda_graphs": False}
    assert manifest["graphs"]["draft"]["tuning"] == {"cuda_graphs": False}


@pytest.mark.parametrize(
    ("server", "is_right"),
    [(FakeServer(), True), (FakeServer(lambda task: "xy"), False), (FakeServer(lambda task: None), False)],
    ids=["right", "mixed", "lost"],
)
def test_streams_are_compared_with_offline_texts(server, is_right, monkeypatch, tmp_path):
    monkeypatch.setattr(soak_main, "make_tasks", lambda bundle, prompts: TASKS)
    monkeypatch.setattr(serve, "ServeProcess", lambda bundle, log: server)
    monkeypatch.setattr(checks, "SECONDS", 0.05)
    rows = checks.server_rows(tmp_path / "bundle", tmp_path)
    judged = {row["what"]: row["ok"] for row in rows if row["ok"] is not None}
    assert judged.pop("server, exit code after SIGTERM") is True
    assert list(judged) == ["server, 8 streams", "server, 8 streams, one in five cut off"]
    assert (list(judged.values()) == [True, True]) is is_right


@pytest.mark.export
def test_a_wide_model_keeps_the_rows_it_had(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from bench.gpu_check.decoding import MODEL

    wide = checks.wide_model(MODEL, tmp_path / "wide")
    one, other = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (MODEL, wide))
    rows = other.get_input_embeddings().weight
    assert rows.shape[0] == checks.WIDE_VOCAB == other.config.vocab_size
    had = one.get_input_embeddings().weight
    assert torch.equal(rows[: len(had)], had) and not rows[len(had) :].any()
    assert (wide / "tokenizer.json").exists()
