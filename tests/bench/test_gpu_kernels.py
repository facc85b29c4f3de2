# SPDX-License-Identifier: Apache-2.0
"""What gpu-check demands of the kernels, tried on their build for the CPU."""

from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import speccompile
from bench.gpu_check import checks, child, decoding, kernels, ort_cuda
from speccompile.core.sampling import SamplingParams
from speccompile.ops.spec_verify import spec_verify
from tests import store
from tests.backends.fake_ort import FakeOrt
from tests.backends.tensorrt.fake_cuda import FakeCuda
from tests.plugins import host_lab

pytestmark = pytest.mark.export


def _cases():  # type: ignore[no-untyped-def]
    return kernels.check_cases(vocabs=(500,), batches=(2,))


def _on_cpu(case: kernels.Case, dtype: str):  # type: ignore[no-untyped-def]
    kind = host_lab.NUMPY_DTYPES[dtype]
    return host_lab.verify(host_lab.kernels(), {**case, "logits": case["logits"].astype(kind)})


def test_the_kernels_pass_the_check():
    (row,) = kernels.check_verify(_on_cpu, _cases())
    assert row["ok"] is True, row
    assert row["got"].startswith("16 of 16 equal")


def test_a_wrong_kernel_does_not():
    def wrong(case: kernels.Case, dtype: str):  # type: ignore[no-untyped-def]
        path, num_accepted, next_token = _on_cpu(case, dtype)
        return path, num_accepted, next_token + 1

    (row,) = kernels.check_verify(wrong, _cases())
    assert row["ok"] is False and "vocab 500, batch 2" in row["got"]


def test_nothing_checked_is_not_a_pass():
    assert kernels.check_verify(_on_cpu, iter(()))[0]["ok"] is False


def test_the_cases_accept_refuse_and_hold_in_every_dtype():
    kept = [spec_verify(**case)[1] for _, case in _cases()]
    assert max(k.max() for k in kept) >= 3 and min(k.min() for k in kept) == 0
    for _, case in _cases():
        for kind in (np.float16, ml_dtypes.bfloat16):
            np.testing.assert_array_equal(case["logits"].astype(kind).astype(np.float32), case["logits"])
        bits = kernels.bits_from_floats(case["logits"], "bfloat16")
        np.testing.assert_array_equal(bits.view(ml_dtypes.bfloat16).astype(np.float32), case["logits"])


class Recorder:
    """A device that notes in which order things are put on its stream."""

    stream = 7

    def __init__(self) -> None:
        self.put: list[str] = []
        self._events = iter(("start", "end"))

    def capture(self, work):  # type: ignore[no-untyped-def]
        work()
        return SimpleNamespace(launch=lambda: self.put.append("graph"))

    def call(self, name: str, *arguments: object) -> object:
        if name == "cudaEventRecord":
            self.put.append(f"event {arguments[0]}")
        return next(self._events) if name == "cudaEventCreate" else 40.0

    def synchronize(self) -> None:
        self.put.append("wait")


def test_the_gpu_is_busy_when_the_time_starts():
    """Or the time of the CPU to launch the graph would count."""
    device = Recorder()
    assert kernels.Bench(device).time_ms([lambda: None]) == 40.0 / kernels.LAUNCHES  # type: ignore[arg-type]
    assert device.put[1:6] == ["graph", "event start", "graph", "event end", "wait"]


def test_small_copies_are_cold(monkeypatch):
    """Each of a graph's copies reads bytes that no other reads, and writes likewise, as long as there are any."""

    class Copier(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.copies: list[tuple[int, int, int]] = []

        def allocate(self, num_bytes: int) -> SimpleNamespace:
            return SimpleNamespace(address=0x1000 + 0x100000 * len(self.copies), num_bytes=num_bytes)

        def copy(self, dest: int, source: int, num_bytes: int) -> None:
            self.copies.append((dest, source, num_bytes))

    monkeypatch.setattr(kernels, "COLD_BYTES", 1000)
    monkeypatch.setattr(kernels, "LAUNCHES", 5)
    device = Copier()
    bench = kernels.Bench(device)  # type: ignore[arg-type]
    assert kernels.measure_copy(bench, 300) == pytest.approx(2 * 300 / (40.0 / 5) / 1e6)
    in_graph = device.copies[1:]  # the first warms up
    assert [source - 0x1000 for _, source, _ in in_graph] == [0, 300, 600, 0, 300]
    assert all(dest == source and size == 300 for dest, source, size in in_graph)
    device = Copier()
    kernels.measure_copy(kernels.Bench(device), 1000)  # type: ignore[arg-type]
    assert {size for *_, size in device.copies} == {1000}


@pytest.mark.parametrize(("nodes", "expected"), [(1, [0]), (7, [0, 0, 0, 1, 1, 2, 2])])
def test_trees(nodes, expected):
    assert [max(p, 0) for p in kernels.tree_parents(nodes, is_chain=False)] == expected


PROMPTS = [row["prompt_ids"] for row in decoding.golden_rows()[:4]]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("gpu-check")


@pytest.fixture(scope="module")
def bundle(work):
    pytest.importorskip("torch")
    with store.cheap_stages():
        return ort_cuda.OrtCuda().build(work)


@pytest.fixture
def fake_ort(monkeypatch):
    return FakeOrt(monkeypatch, FakeCuda(4 << 30))


@pytest.fixture
def engine(bundle, fake_ort):
    return speccompile.load(bundle)


def test_captured_graphs_are_counted(engine):
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=20))
    rows = checks.graph_rows(engine)
    assert [r["what"] for r in rows] == ["CUDA graphs, target", "CUDA graphs, draft"]
    assert all(r["ok"] is True and r["got"].endswith(" captured") and r["got"] != "0 captured" for r in rows)


def test_graphs_that_were_refused_or_given_up_are_named(bundle, fake_ort):
    fake_ort.refused.add(bundle / "graphs/target")
    engine = speccompile.load(bundle)
    engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=3))
    target, draft = checks.graph_rows(engine)
    assert target["ok"] is False and target["got"].startswith("0 captured; This session cannot use the graph capture")
    engine.engines[1].plan.give_up_graphs("CUDA failure 900")
    draft = checks.graph_rows(engine)[1]
    assert draft["ok"] is False and draft["got"] == "0 captured; CUDA failure 900"


def test_tree_commits_are_compared(engine, monkeypatch):
    target = engine.engines[0]
    row = ort_cuda.rollback_row(target, PROMPTS[0] * 24)
    num = ort_cuda.NUM_COMMITS * len(target.caches.names)
    assert row["ok"] is True and row["got"] == f"{num} of {num} caches equal"
    real = target.compact
    monkeypatch.setattr(target, "compact", lambda *given: [real(*given) for _ in range(3)])
    row = ort_cuda.rollback_row(target, PROMPTS[0] * 24)
    assert row["ok"] is False and row["got"] == f"0 of {num} caches equal"


def test_sampled_texts_are_compared(bundle, fake_ort, work, monkeypatch):
    monkeypatch.setattr(ort_cuda, "NUM_TOKENS", 12)
    twin = ort_cuda.copy_for_cpu(bundle, work / "on-cpu")
    rows = ort_cuda.sampled_rows(bundle, twin, PROMPTS)
    assert [r["what"] for r in rows] == [f"sampled texts, {m}" for m in ("none", "ngram", "draft_model")]
    assert all(r["ok"] is True and r["got"] == "4 of 4 equal" for r in rows)
    assert type(speccompile.load(twin, method="none").engines[0]).__name__ == "OrtEngine"

    def load_colder(path, **given):
        """Draws from the distributions of another temperature."""
        engine = load(path, **given)
        generate = engine.generate
        engine.generate = lambda prompts, params: generate(prompts, [replace(p, temperature=0.5) for p in params])
        return engine

    load, loaders = speccompile.load, {twin: speccompile.load, bundle: load_colder}
    monkeypatch.setattr(speccompile, "load", lambda path, **given: loaders[path](path, **given))
    assert all(r["ok"] is False for r in ort_cuda.sampled_rows(bundle, twin, PROMPTS))


def test_the_part_tokens_has_all_these_rows(bundle, fake_ort, work, monkeypatch):
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(decoding, "build_bundle", lambda *given: bundle)
    monkeypatch.setattr(decoding, "equality_rows", lambda *given: [])
    monkeypatch.setattr(checks, "NUM_REQUESTS", 12)
    monkeypatch.setattr(checks, "NUM_WARM", 12)
    monkeypatch.setattr(ort_cuda, "NUM_SAMPLED", 2)
    monkeypatch.setattr(ort_cuda, "NUM_TOKENS", 30)  # so many that shapes come again and are captured
    held = child.run_part("ort-cuda.tokens", work)
    assert held["status"] == "passed"
    judged = ["CUDA graphs, target", "CUDA graphs, draft", "tree commits, 5 at one shape"]
    judged += [f"sampled texts, {name}" for name in ort_cuda.SAMPLED]
    judged += ["free memory over 12 requests"]
    assert [r["what"] for r in held["rows"] if r["ok"] is not None] == judged


def test_a_hybrid_is_compared_and_timed_plain_and_with_its_drafts(bundle, fake_ort, work, monkeypatch):
    asked = []
    monkeypatch.setattr(decoding, "build_bundle", lambda *given: asked.append(given[1:]) or bundle)
    for name, value in {"NUM_TIMED": 2, "NUM_TOKENS": 8, "BATCHES": (2,), "ROUNDS": 1}.items():
        monkeypatch.setattr(decoding, name, value)
    rows = decoding.hybrid_rows(work, "ort-cuda", 1e-3, "engine.device=cuda")
    assert asked == [("ort-cuda-hybrid", "pycode-hybrid-mtp", "engine.device=cuda")]
    assert [r["what"] for r in rows if r["ok"] is not None] == [
        "hybrid: greedy tokens, none, batch 2",
        "hybrid: greedy tokens, drafts, batch 2",
    ]
    assert all(r["ok"] is True for r in rows if r["ok"] is not None) and len(rows) == 5
