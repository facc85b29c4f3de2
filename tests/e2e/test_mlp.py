# SPDX-License-Identifier: Apache-2.0
"""A tiny target with MLP heads, through the whole build: the text is the target's own on every backend."""

import json

import numpy as np
import pytest

import speccompile
from speccompile.core.jobs import StepCosts
from speccompile.core.sampling import SamplingParams
from tests.e2e.conftest import build_bundle
from tests.pipeline import fakes

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1], [8], [8, 2, 8, 1, 8], [30, 4, 9, 9]]
BACKENDS = ("onnxruntime", "reference")
HIDDEN, INNER, NUM_HEADS = 64, fakes.VOCAB, 3


def write_target(folder, seed=3):
    """Writes a Llama whose text varies: with the weights of `fakes` it repeats one token."""
    fakes.make_checkpoint(folder, hidden=HIDDEN)
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(seed)
    rows = tensors["model.embed_tokens.weight"]
    # What a token attends to decides the next one, not its own embedding, which is also the LM head.
    tensors = {n: t * np.float32(12) if "proj" in n else t for n, t in tensors.items()}
    tensors["model.embed_tokens.weight"] = rng.normal(size=rows.shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")


def write_heads(folder, target):
    """Writes a speculator in the published layout that is a table of the target's successor tokens.

    With as many inner dims as tokens an embedding can be one-hot, and a head a table of successors; the state of
    the target has no influence.
    """
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    counts = np.zeros((INNER, INNER))
    for prompt in PROMPTS:
        text = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)[0].tolist()
        np.add.at(counts, (text[1:], text[:-1]), 1)
    folder.mkdir()
    sizes = {"emb_dim": HIDDEN, "inner_dim": INNER, "vocab_size": INNER, "n_predict": NUM_HEADS}
    (folder / "config.json").write_text(json.dumps({"model_type": "mlp_speculator", **sizes}))
    tensors = {}
    for i in range(NUM_HEADS):
        tensors[f"emb.{i}.weight"] = np.eye(INNER)
        tensors[f"proj.{i}.weight"] = 1e-3 * np.ones((INNER, HIDDEN if i == 0 else INNER))
        tensors[f"head.{i}.weight"] = counts / (1 + counts.sum(axis=0))
        tensors[f"ln.{i}.weight"], tensors[f"ln.{i}.bias"] = np.ones(INNER), np.zeros(INNER)
    save_file({f"speculator.{n}": t.astype(np.float32) for n, t in tensors.items()}, folder / "model.safetensors")


@pytest.fixture(scope="module")
def bundles(e2e_folder):
    folder = e2e_folder / "mlp"
    folder.mkdir()
    write_target(folder / "big")
    write_heads(folder / "heads", folder / "big")
    text = (
        "target: {model: big}\nspeculator: {method: mlp, model: heads}\n"
        "engine: {max_batch_size: 4, max_seq_len: 60, max_draft_nodes: 4, threads: 1}\n"
    )
    return {name: build_bundle(folder, name, text, (f"engine.backend={name}",)) for name in BACKENDS}


def greedy(num):
    return [SamplingParams(max_new_tokens=num + i) for i in range(len(PROMPTS))]


def sampled(num):
    heats = (1.0, 0.7, 0.0, 1.2, 0.9)
    return [
        SamplingParams(max_new_tokens=num, temperature=t, top_p=0.95 if i % 2 else 1.0, seed=i)
        for i, t in enumerate(heats)
    ]


def tokens(results):
    return [r.tokens for r in results]


@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": 3}, {"num_draft_tokens": 2}])
def test_greedy_text_equals_plain_decoding(bundles, options, monkeypatch):
    # Measured costs of so small a target may say that drafting does not pay: without them it is done in any case.
    monkeypatch.setattr(StepCosts, "from_json", classmethod(lambda cls, record: cls()))
    method = {"method": "mlp", **options}
    engine = speccompile.load(bundles["onnxruntime"], method=method, verify=False)
    plain = engine.generate(PROMPTS, greedy(40), speculative=False, batch_size=1)
    for batch_size in (1, 4):
        fast = engine.generate(PROMPTS, greedy(40), batch_size=batch_size)
        assert tokens(fast) == tokens(plain)
        assert sum(r.stats["num_accepted"] for r in fast) >= 20
    assert len(set(plain[0].tokens)) > 3


def test_backends_agree(bundles):
    made = {}
    for path in bundles.values():
        engine = speccompile.load(path, method={"method": "mlp", "num_draft_tokens": 3}, verify=False)
        for kind, params in (("greedy", greedy(8)), ("sampled", sampled(8))):
            for batch_size in (1, 4):
                results = engine.generate(PROMPTS, params, batch_size=batch_size)
                made.setdefault(kind, set()).add(str(tokens(results)))
    assert {kind: len(texts) for kind, texts in made.items()} == {"greedy": 1, "sampled": 1}


def test_the_same_seed_gives_the_same_text_in_any_batch(bundles):
    engine = speccompile.load(bundles["onnxruntime"], verify=False)
    alone = tokens(engine.generate(PROMPTS, sampled(40), batch_size=1))
    assert tokens(engine.generate(PROMPTS, sampled(40), batch_size=4)) == alone
    backwards = engine.generate(PROMPTS[::-1], sampled(40)[::-1], batch_size=3)
    assert tokens(backwards)[::-1] == alone
    other = {"method": "mlp", "drafts": "greedy"}
    deterministic = speccompile.load(bundles["onnxruntime"], method=other, verify=False)
    plain = tokens(deterministic.generate(PROMPTS, sampled(40), speculative=False))
    assert tokens(deterministic.generate(PROMPTS, sampled(40), batch_size=4)) == plain


def test_the_manifest_describes_the_heads(bundles):
    from speccompile.bundle.bundle import read_bundle

    for path in bundles.values():
        record = read_bundle(path).graphs["heads"]
        assert record["role"] == "heads" and record["checks"] == {"num_tokens": NUM_HEADS}
        assert record["dims"]["inner_size"] == INNER and record["max_rows"] == 0
        vocab = fakes.VOCAB
        weights = NUM_HEADS * (2 * vocab * INNER + 2 * INNER) + INNER * HIDDEN + (NUM_HEADS - 1) * INNER * INNER
        assert record["dims"]["num_params"] == weights


def test_a_cache_that_fills_up_ends_where_plain_decoding_ends(bundles):
    engine = speccompile.load(bundles["onnxruntime"], method={"method": "mlp", "num_draft_tokens": 3}, verify=False)
    params = SamplingParams(max_new_tokens=500, ignore_eos=True)
    fast, plain = (engine.generate(PROMPTS, params, speculative=s, batch_size=3) for s in (True, False))
    assert tokens(fast) == tokens(plain)
    assert {r.finish_reason for r in fast} == {"cache_full"}
