# SPDX-License-Identifier: Apache-2.0
"""The reference evaluator and ONNX Runtime decode a random pair to the same tokens, with every method."""

import pytest

import speccompile
from speccompile.core.sampling import SamplingParams
from tests.e2e.conftest import build_bundle
from tests.e2e.test_mlp import write_target
from tests.pipeline import fakes

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1], [8, 2, 8, 1, 8]]
MAX_SEQ = 40
PARAMS = [
    SamplingParams(max_new_tokens=12),
    SamplingParams(max_new_tokens=9, temperature=0.9, seed=4),
    SamplingParams(max_new_tokens=7, temperature=1.1, top_k=12, top_p=0.9, seed=5),
]


@pytest.fixture(scope="module")
def bundles(e2e_folder):
    write_target(e2e_folder / "big")
    fakes.make_checkpoint(e2e_folder / "small", hidden=32, layers=1, seed=1)
    text = (
        "target: {model: big}\nspeculator: {method: draft_model, model: small, num_draft_tokens: 3}\n"
        f"engine: {{max_batch_size: 3, max_seq_len: {MAX_SEQ}, max_draft_nodes: 4, threads: 1}}\n"
    )
    names = ("reference", "onnxruntime")
    return {name: build_bundle(e2e_folder, f"tiny-{name}", text, (f"engine.backend={name}",)) for name in names}


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_backends_agree(bundles, method):
    tokens = {}
    for name, path in bundles.items():
        engine = speccompile.load(path, method={"method": method, **({"min_match": 1} if method == "ngram" else {})})
        for batch_size in (1, 3):
            results = engine.generate(PROMPTS, PARAMS, batch_size=batch_size)
            tokens[name, batch_size] = [r.tokens for r in results]
            assert all(r.finish_reason in ("length", "stop") for r in results)
    assert len({str(value) for value in tokens.values()}) == 1
    assert max(len(t) for t in next(iter(tokens.values()))) > 3


@pytest.fixture(scope="module")
def whole_texts(bundles, e2e_folder):
    """Returns prompts, more than a batch has slots, and transformers' greedy texts up to the end of the cache."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(e2e_folder / "big", dtype=torch.float32).eval()
    prompts, texts = [*PROMPTS, [30, 4, 9, 9], [7] * 6], []
    for prompt in prompts:
        text = list(prompt)
        while len(text) <= MAX_SEQ:
            with torch.no_grad():
                text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        texts.append(text[len(prompt) :])
    return prompts, texts


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_a_small_cache_ends_with_cache_full_where_it_is_full(bundles, whole_texts, method):
    prompts, texts = whole_texts
    engine = speccompile.load(bundles["onnxruntime"], method=method)
    results = engine.generate(prompts, SamplingParams(max_new_tokens=500, ignore_eos=True))
    assert {r.finish_reason for r in results} == {"cache_full"}
    assert [r.tokens for r in results] == texts
    assert all(len(set(text)) > 3 for text in texts)
