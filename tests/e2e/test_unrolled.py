# SPDX-License-Identifier: Apache-2.0
"""The trained pair with the draft unrolled: the target's greedy texts, and the sampled texts of single steps."""

import json
from pathlib import Path

import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.runtime.engine import load
from tests.e2e.conftest import ROOT, build_bundle, pair_recipe

LENGTH = 5


@pytest.fixture(scope="module")
def unrolled(e2e_folder: Path) -> Path:
    overrides = (f"speculator.num_draft_tokens={LENGTH}", "speculator.engine_form=unrolled")
    return build_bundle(e2e_folder, "unrolled", pair_recipe("none"), overrides)


def test_the_unrolled_draft_changes_no_text(unrolled: Path, pair: Path, golden: list[dict]) -> None:
    chain, single = load(unrolled), load(pair, method={"method": "draft_model", "num_draft_tokens": LENGTH})
    rows = [json.loads(line) for line in (ROOT / "examples/prompts.jsonl").read_text().splitlines()][:6]
    prompts = [row["prompt"] for row in rows]
    asked = [SamplingParams(max_new_tokens=24 + 4 * i, temperature=0.8 * (i % 2), seed=i) for i in range(len(prompts))]
    texts, expected = chain.generate(prompts, asked), single.generate(prompts, asked)
    for i, (got, want) in enumerate(zip(texts, expected, strict=True)):
        assert got.tokens == want.tokens
        assert got.stats["num_draft_tokens"] == want.stats["num_draft_tokens"]
        if asked[i].is_greedy:
            tokens = golden[i]["tokens"]
            assert got.tokens[: len(tokens)] == tokens[: len(got.tokens)]
    assert chain.bundle is not None
    checks = chain.bundle.manifest["graphs"]["draft"]["checks"]
    assert checks == {"num_tokens": LENGTH, "num_equal": 1}
