# SPDX-License-Identifier: Apache-2.0
"""Text of the example pair: greedy as transformers', token for token, sampled by the seed alone."""

import json
from pathlib import Path

import pytest

import speccompile
from speccompile.core.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 128


# A length that the recipe leaves open depends on what the build measured, and may be 0 where a machine is busy.
METHODS = {
    "none": "none",
    "draft_model": {"method": "draft_model", "num_draft_tokens": 4},
    "ngram": {"method": "ngram", "tokens_per_match": 2},
}


@pytest.fixture(scope="module")
def engines(pair):
    return {name: speccompile.load(pair, method=method, verify=False) for name, method in METHODS.items()}


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("method", ["none", "draft_model", "ngram"])
def test_tokens_equal_transformers(engines, golden, method, batch_size):
    # Every 3rd prompt with a draft model in batches; alone, and without a draft model, fewer keep the test short.
    parts = {("none", 1): 16, ("draft_model", 1): 12, ("ngram", 1): 8, ("none", 8): 6, ("ngram", 8): 4}
    rows = golden[:: parts.get((method, batch_size), 3)]
    params = SamplingParams(max_new_tokens=NUM_TOKENS)
    results = engines[method].generate([row["prompt_ids"] for row in rows], params, batch_size=batch_size)
    differing = [i for i, (a, b) in enumerate(zip(results, rows, strict=True)) if a.tokens != b["tokens"]]
    assert differing == []
    if method != "none":
        steps = sum(r.stats["num_steps"] for r in results)
        accepted = sum(r.stats["num_accepted"] for r in results)
        assert 1 + accepted / steps > 1.2


def test_the_tokenizer_gives_the_ids_that_transformers_gives(engines, golden):
    lines = (ROOT / "examples/prompts.jsonl").read_text().splitlines()
    assert len(lines) == len(golden) >= 64
    for line, row in zip(lines, golden, strict=True):
        assert engines["none"].encode(json.loads(line)["prompt"]) == row["prompt_ids"]


def test_the_golden_file_is_what_transformers_gives(golden):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "examples/models/pycode-16m", dtype=torch.float32)
    for row in golden[:64:32]:
        ids = torch.tensor([row["prompt_ids"]])
        options = {"max_new_tokens": 48, "do_sample": False, "pad_token_id": 2}
        out = model.eval().generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert out[0, ids.shape[1] :].tolist() == row["tokens"][:48]


@pytest.fixture(scope="module")
def int8_plain(int8_pair, golden):
    """Returns an engine of the int8 target, 16 prompts, and the texts that it gives them by single steps alone."""
    engine, prompts = speccompile.load(int8_pair, verify=False), [row["prompt_ids"] for row in golden[:16]]
    params = SamplingParams(max_new_tokens=64)
    return engine, prompts, [r.tokens for r in engine.generate(prompts, params, speculative=False, batch_size=1)]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_int8_speculation_equals_int8_plain_decoding(int8_pair, int8_plain, batch_size):
    engine, prompts, plain = int8_plain
    lookup, params = speccompile.load(int8_pair, method="ngram", verify=False), SamplingParams(max_new_tokens=64)
    for fast in (engine, lookup):
        assert [r.tokens for r in fast.generate(prompts, params, batch_size=batch_size)] == plain


def test_abandoned_streams_and_runs_leave_the_engine_whole(engines, golden):
    engine, rows = engines["draft_model"], golden[:6]
    params = SamplingParams(max_new_tokens=NUM_TOKENS)
    for num in (1, 5):
        stream = engine.stream(rows[0]["prompt_ids"], params)
        for _ in range(num):
            next(stream)
    run = engine.run([row["prompt_ids"] for row in rows], params, batch_size=4)
    next(run)
    results = engine.generate([row["prompt_ids"] for row in rows[3:]], params, batch_size=2)
    assert [r.tokens for r in results] == [row["tokens"] for row in rows[3:]]


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
