# SPDX-License-Identifier: Apache-2.0
"""Targets with recurrent layers build and decode as transformers does: a multimodal Qwen3.5 folder, Granite 4."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speccompile.bundle.stage_cache import StageCache
from speccompile.pipeline import build
from tests import store
from tests.export.families import VOCAB
from tests.export.harness import make_checkpoint
from tests.export.hybrids import HYBRIDS, VARIANTS
from tests.export.towers import make_tower, tower_config
from tests.greedy_check import differing
from tests.pipeline import fakes

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import speccompile  # noqa: E402
from speccompile import SamplingParams  # noqa: E402
from speccompile.certificate.caches import check_caches  # noqa: E402
from speccompile.certificate.faults import check_faults  # noqa: E402
from speccompile.certificate.greedy import plain_texts  # noqa: E402

pytestmark = pytest.mark.export

NUM_TOKENS = 40
NGRAM = {"method": "ngram", "num_draft_tokens": 4, "tokens_per_match": 1}
SHARED = {"shared_bytes": 1_000_000}  # the second decoding of a text drafts from the first
TREE = {"method": "suffix", "depth": 4, "num_draft_tokens": 4, "tree": "auto", "tokens_per_match": 1, **SHARED}
LENGTHS = (9, 1, 17, 4, 6, 12, 3, 8, 15, 5, 7, 11)
PROMPTS = [np.random.default_rng(seed).integers(3, VOCAB, n).tolist() for seed, n in enumerate(LENGTHS)]
REPEATED = [(prompt * 9)[:18] for prompt in PROMPTS]  # in which lookups find enough drafts for a check


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with the recipe's checkpoint, and transformers' whole model."""
    made = tmp_path_factory.mktemp("hybrid")
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = tower_config("qwen3_5", hidden_size=64, num_hidden_layers=3, layer_types=kinds, head_dim=16)
    model = make_tower(config, made / "target")
    (made / "target/tokenizer.json").write_text(json.dumps(fakes.tokenizer(VOCAB)))
    return made, model


def _load(folder: Path, quantization: str, monkeypatch: pytest.MonkeyPatch, speculator: Any = NGRAM) -> Any:
    # On a target as small as this plain decoding is often faster: no clock decides whether to draft.
    monkeypatch.setattr("speccompile.runtime.spec_engine.controller_of", lambda proposer: None)
    recipe = folder / f"{quantization}.yaml"
    engine = "{max_batch_size: 4, max_seq_len: 64, max_draft_nodes: 8, threads: 1}"
    recipe.write_text(
        f"target: {{model: target, quantization: {quantization}}}\n"
        f"speculator: {json.dumps(speculator)}\nengine: {engine}\n"
    )
    with store.cheap_stages():  # one export for all quantizations
        bundle = build(fakes.make_plan(recipe), folder / f"out-{quantization}", cache=StageCache(folder / "cache"))
    return speccompile.load(bundle.path)


def _check_trees(engine: Any) -> None:
    """Checks a bundle with planted trees as its certificate does, and that its method may be one of trees."""
    bundle = engine.bundle.path
    check = check_faults(engine, REPEATED * 3, 24)
    assert check.status == "passed", check.summary
    runs = [run for run in check.facts["runs"] if run["fault"] == "full trees"]
    assert len(runs) == 2 and all(run["num_accepted"] > 12 for run in runs)
    check = check_caches(engine, REPEATED, plain_texts(engine, REPEATED, 24))
    assert check.status == "passed" and "with trees" in check.summary, check.summary
    assert check.facts["logit_deviation"] < 1e-4 and check.facts["num_accepted"] > 12
    engine, params = speccompile.load(bundle, method=TREE), SamplingParams(max_new_tokens=NUM_TOKENS)
    plain = engine.generate(PROMPTS, params, batch_size=1, speculative=False)
    for batch_size in (1, 3):
        results = engine.generate(PROMPTS, params, batch_size=batch_size)
        assert [r.tokens for r in results] == [r.tokens for r in plain]
    assert sum(r.stats["num_accepted"] for r in results) > 12


def _check_greedy(model: Any, texts: list[list[int]]) -> None:
    """Checks that the texts after PROMPTS are transformers' greedy ones, up to the stop token."""
    assert differing(model, PROMPTS, texts) == []
    assert all(len(text) == NUM_TOKENS or text[-1] == 2 for text in texts)


def test_greedy_text_equals_transformers(folder, monkeypatch):
    engine, params = _load(folder[0], "none", monkeypatch), SamplingParams(max_new_tokens=NUM_TOKENS)
    for batch_size in (1, 4):
        results = engine.generate(PROMPTS, params, batch_size=batch_size)
        _check_greedy(folder[1], [r.tokens for r in results])
        plain = engine.generate(PROMPTS, params, batch_size=batch_size, speculative=False)
        assert [r.tokens for r in plain] == [r.tokens for r in results]
        assert sum(r.stats["num_draft_tokens"] for r in results) > 0
    _check_trees(engine)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_text_is_the_same_with_drafts(folder, quantization, monkeypatch):
    engine, params = _load(folder[0], quantization, monkeypatch), SamplingParams(max_new_tokens=NUM_TOKENS)
    single = [r.tokens for r in engine.generate(PROMPTS, params, batch_size=1, speculative=False)]
    for batch_size in (1, 4):
        results = engine.generate(PROMPTS, params, batch_size=batch_size)
        assert [r.tokens for r in results] == single
        assert sum(r.stats["num_draft_tokens"] for r in results) > 0
    _check_trees(engine)


def test_greedy_text_of_a_mamba_2_hybrid_equals_transformers(tmp_path, monkeypatch):
    # Without limits of time steps, which tests/export/test_hybrids.py has.
    model = make_checkpoint({**HYBRIDS["granite4"], "time_step_limit": [0.0, float("inf")]}, tmp_path / "target")
    (tmp_path / "target/tokenizer.json").write_text(json.dumps(fakes.tokenizer(VOCAB)))
    engine, params = _load(tmp_path, "none", monkeypatch, TREE), SamplingParams(max_new_tokens=NUM_TOKENS)
    results = engine.generate(PROMPTS, params, batch_size=4)
    plain = engine.generate(PROMPTS, params, batch_size=1, speculative=False)
    assert [r.tokens for r in results] == [r.tokens for r in plain]
    _check_greedy(model, [r.tokens for r in plain])
    assert sum(r.stats["num_draft_tokens"] for r in results) > 0
    _check_trees(engine)


def test_a_target_without_attention_has_no_cache_to_compact(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps({**VARIANTS["mamba2"], "num_hidden_layers": 1}))
    (tmp_path / "target/tokenizer.json").write_text(json.dumps(fakes.tokenizer(VOCAB)))
    engine, params = _load(tmp_path, "none, weights: random", monkeypatch), SamplingParams(max_new_tokens=NUM_TOKENS)
    assert not (tmp_path / "out-none, weights: random/graphs/rollback").exists()
    plain = engine.generate(PROMPTS, params, batch_size=1, speculative=False)
    results = engine.generate(PROMPTS, params, batch_size=4)
    assert [r.tokens for r in results] == [r.tokens for r in plain]
    assert sum(r.stats["num_draft_tokens"] for r in results) > 0
    _check_trees(engine)
