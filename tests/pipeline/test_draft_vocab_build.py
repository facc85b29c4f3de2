# SPDX-License-Identifier: Apache-2.0
"""A draft with a part of the vocabulary in a build: its numbers, its texts, its record and its cache key."""

from pathlib import Path

import numpy as np
import pytest

from speccompile.bundle.graphs import find_graph
from speccompile.bundle.stage_cache import StageCache
from speccompile.core import registry, specs
from speccompile.pipeline import build
from tests import store
from tests.greedy_check import differing
from tests.pipeline import fakes

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import speccompile  # noqa: E402
from speccompile import SamplingParams  # noqa: E402

pytestmark = pytest.mark.export

WORDS = (1, 3, 4, 5, 7, 9, 12, 20)
KEPT = [1, 2, 3, 4, 5, 7, 9, 12]  # 1 and 2 end a text; of the equally frequent others the lowest six
PROMPTS = [[3, 5, 7, 5, 7], [4, 9]]


def recipe_of(folder: Path, text: str, extra: str = "") -> Path:
    if not (folder / "big").exists():
        fakes.make_checkpoint(folder / "big", hidden=64, layers=1)
        fakes.make_checkpoint(folder / "small", hidden=64, layers=1)
    (folder / f"{text}.txt").write_text("".join(f"w{i} " for i in WORDS) * 200 if text == "kept" else "w2 w3 " * 900)
    path = folder / f"{text}.yaml"
    speculator = f"{{method: draft_model, model: small, draft_vocab_size: 8, draft_vocab_text: {text}.txt{extra}}}"
    engine = "{max_seq_len: 48, max_draft_nodes: 16, threads: 1, max_batch_size: 2}"
    path.write_text(f"target: {{model: big}}\nspeculator: {speculator}\nengine: {engine}\n")
    return path


def test_a_bundle_drafts_the_kept_tokens_alone_and_its_text_is_the_targets(tmp_path):
    plan = fakes.make_plan(recipe_of(tmp_path, "kept"))
    with store.cheap_stages():
        bundle = build(plan, tmp_path / "out", cache=StageCache(tmp_path / "cache"))
    record = bundle.graphs["draft"]
    vocab = record["checks"]["draft_vocab"]
    assert vocab == {"size": 8, "coverage": 0.875, "held_out": 0.875}

    loaded = speccompile.load(bundle.path)
    engine = loaded.engines[1]
    feeds = {specs.TOKENS: np.array([[3, 1, 4, 1, 5]]), specs.LENGTHS: np.zeros(1, np.int64)}
    feeds |= {specs.SCORED_NODES: np.array([[4, 1]]), specs.TEMPERATURE: np.ones(1, np.float32)}
    made = {name: np.asarray(value).copy() for name, value in engine.run(feeds).items()}
    from transformers import AutoModelForCausalLM

    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    with torch.no_grad():
        logits = draft(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, [4, 1]].double().numpy()
    assert np.flatnonzero(made[specs.NODE_PROBS][0].sum(0)).tolist() == KEPT
    wanted = np.zeros_like(logits)
    wanted[:, KEPT] = np.exp(logits[:, KEPT]) / np.exp(logits[:, KEPT]).sum(1, keepdims=True)
    np.testing.assert_allclose(made[specs.NODE_PROBS][0], wanted, atol=1e-6)
    assert made[specs.CANDIDATES][0, :, 0].tolist() == wanted.argmax(1).tolist()
    assert engine.spec.vocab_size == fakes.VOCAB

    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    texts = [one.tokens for one in loaded.generate(PROMPTS, params)]
    with torch.no_grad():
        target = AutoModelForCausalLM.from_pretrained(tmp_path / "big", dtype=torch.float32)
        assert differing(target, PROMPTS, texts) == []


def test_the_key_depends_on_the_tokens_and_not_on_the_files_name(tmp_path):
    def key(path: Path) -> str:
        plan = fakes.make_plan(path)
        backend = registry.backend(plan.engine.backend, plan.engine.device)
        target = find_graph(plan, plan.target, None, backend)
        return find_graph(plan, plan.drafts[0], target.dims, backend).key

    first = key(recipe_of(tmp_path, "kept"))
    (tmp_path / "again.txt").write_text((tmp_path / "kept.txt").read_text())
    again = tmp_path / "again.yaml"
    again.write_text((tmp_path / "kept.yaml").read_text().replace("kept.txt", "again.txt"))
    assert key(again) == first
    assert key(recipe_of(tmp_path, "other")) != first
