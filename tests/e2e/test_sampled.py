# SPDX-License-Identifier: Apache-2.0
"""Sampled text of the example pair: the seed alone decides it."""

import pytest

import speccompile
from speccompile.core.sampling import SamplingParams


def requests(golden, num):
    asked = [(0.8, 0, 0.95), (1.0, 40, 1.0), (0.0, 0, 1.0), (1.2, 0, 0.9), (0.6, 10, 0.8)]
    prompts = [row["prompt_ids"] for row in golden[:num]]
    params = [
        SamplingParams(max_new_tokens=40, temperature=t, top_k=k, top_p=p, seed=100 + i)
        for i, (t, k, p) in enumerate(asked[i % len(asked)] for i in range(num))
    ]
    return prompts, params


@pytest.mark.parametrize("method", ["none", "draft_model", "ngram"])
def test_the_same_seed_gives_the_same_text_in_any_batch(pair, golden, method):
    engine = speccompile.load(pair, method=method, verify=False)
    prompts, params = requests(golden, 10)
    alone = [r.tokens for r in engine.generate(prompts, params, batch_size=1)]
    assert [r.tokens for r in engine.generate(prompts, params, batch_size=8)] == alone
    backwards = engine.generate(prompts[::-1], params[::-1], batch_size=3)
    assert [r.tokens for r in backwards][::-1] == alone
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


def test_deterministic_drafts_do_not_change_sampled_text(pair, golden):
    prompts, params = requests(golden, 10)
    greedy_drafts = {"method": "draft_model", "drafts": "greedy"}
    texts = [
        [r.tokens for r in speccompile.load(pair, method=m, verify=False).generate(prompts, params, batch_size=4)]
        for m in ("none", "ngram", greedy_drafts)
    ]
    assert texts[0] == texts[1] == texts[2]


def test_another_seed_gives_another_text(pair, golden):
    engine = speccompile.load(pair, verify=False)
    prompt = golden[0]["prompt_ids"]
    params = [SamplingParams(max_new_tokens=40, temperature=1.0, seed=seed) for seed in range(6)]
    texts = {tuple(r.tokens) for r in engine.generate([prompt] * 6, params, batch_size=6)}
    assert len(texts) == 6
