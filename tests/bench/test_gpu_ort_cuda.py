# SPDX-License-Identifier: Apache-2.0
"""What gpu-check demands of ONNX Runtime on CUDA, tried on the example pair over a fake device."""

from dataclasses import replace

import pytest

import speccompile
from bench.gpu_check import checks, child, decoding, ort_cuda
from speccompile.core.sampling import SamplingParams
from tests import store
from tests.backends.fake_ort import FakeOrt
from tests.backends.tensorrt.fake_cuda import FakeCuda

pytestmark = pytest.mark.export

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
