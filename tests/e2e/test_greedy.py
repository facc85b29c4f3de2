# SPDX-License-Identifier: Apache-2.0
"""Greedy text of the example pair equals transformers', token for token, whatever drafts and batches are used."""

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
    # At batch 1 a part of the prompts keeps the test short; at batch 8 all of them are used.
    rows = golden if batch_size > 1 or method == "ngram" else golden[::3]
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


@pytest.mark.parametrize("batch_size", [1, 8])
def test_int8_speculation_equals_int8_plain_decoding(int8_pair, golden, batch_size):
    prompts, params = [row["prompt_ids"] for row in golden[:16]], SamplingParams(max_new_tokens=64)
    engine = speccompile.load(int8_pair, verify=False)
    plain = engine.generate(prompts, params, speculative=False, batch_size=1)
    fast = engine.generate(prompts, params, batch_size=batch_size)
    assert [r.tokens for r in fast] == [r.tokens for r in plain]
    lookup = speccompile.load(int8_pair, method="ngram", verify=False)
    assert [r.tokens for r in lookup.generate(prompts, params, batch_size=batch_size)] == [r.tokens for r in plain]


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


def test_a_small_cache_ends_with_cache_full_where_it_is_full(e2e_folder, golden):
    from tests.e2e.conftest import build_bundle, pair_recipe

    path = build_bundle(e2e_folder, "short", pair_recipe("none"), ("engine.max_seq_len=128", "engine.max_batch_size=3"))
    rows = [row for row in golden if len(row["prompt_ids"]) < 100][:5]
    prompts = [row["prompt_ids"] for row in rows]
    for method in ("none", "draft_model", "ngram"):
        results = speccompile.load(path, method=method).generate(prompts, SamplingParams(max_new_tokens=500))
        assert {r.finish_reason for r in results} == {"cache_full"}
        for row, result in zip(rows, results, strict=True):
            assert len(row["prompt_ids"]) + len(result.tokens) == 129
            num = min(NUM_TOKENS, len(result.tokens))
            assert result.tokens[:num] == row["tokens"][:num]
