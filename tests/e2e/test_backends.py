# SPDX-License-Identifier: Apache-2.0
"""The reference evaluator and ONNX Runtime decode a random pair to the same tokens, with every method."""

import pytest

import speccompile
from speccompile.core.sampling import SamplingParams
from tests.e2e.conftest import build_bundle
from tests.pipeline import fakes

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1], [8, 2, 8, 1, 8]]
PARAMS = [
    SamplingParams(max_new_tokens=12),
    SamplingParams(max_new_tokens=9, temperature=0.9, seed=4),
    SamplingParams(max_new_tokens=7, temperature=1.1, top_k=12, top_p=0.9, seed=5),
]


@pytest.fixture(scope="module")
def bundles(e2e_folder):
    fakes.make_checkpoint(e2e_folder / "big", hidden=64)
    fakes.make_checkpoint(e2e_folder / "small", hidden=32, layers=1, seed=1)
    text = (
        "target: {model: big}\nspeculator: {method: draft_model, model: small, num_draft_tokens: 3}\n"
        "engine: {max_batch_size: 3, max_seq_len: 40, max_draft_nodes: 4, threads: 1}\n"
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
