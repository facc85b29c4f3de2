# SPDX-License-Identifier: Apache-2.0
"""What seeds give: the texts of every method, greedy and sampled, offline and by the scheduler, as they were."""

import asyncio
import functools
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import speccompile
from speccompile.core.sampling_params import SamplingParams
from speccompile.runtime.requests import Request
from speccompile.runtime.service import Service
from speccompile.runtime.spec_engine import SpecEngine
from tests.golden.method_fakes import MAKERS, TARGET, make_engine
from tests.lab.engines import Letters

pytestmark = pytest.mark.export

FILE = Path(__file__).parent / "texts.json"
NUM = 24
PROMPTS = [
    np.random.default_rng(seed).integers(0, TARGET.vocab, size).tolist()
    for seed, size in enumerate((1, 2, 3, 5, 8, 13, 21, 34))
]
WARPS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.5, "top_k": 4, "top_p": 0.9},
]
GREEDY = [SamplingParams(max_new_tokens=NUM, ignore_eos=True)] * len(PROMPTS)
SAMPLED = [
    SamplingParams(max_new_tokens=NUM, ignore_eos=True, seed=100 + i, **WARPS[i % len(WARPS)])
    for i in range(len(PROMPTS))
]


def offline(engine: SpecEngine, params: list[SamplingParams], prompts: list[list[int]], **options: object):
    """Returns the texts of the offline engine."""
    return [generation.tokens for generation in engine.generate(prompts, params, **options)]


def served(engine: SpecEngine, params: list[SamplingParams], prompts: list[list[int]]):
    """Returns the texts of the scheduler, with drafts in every step."""

    async def ask(service: Service):
        asked = [Request(p, one, speculation="on") for p, one in zip(prompts, params, strict=True)]
        return [answer.tokens for [answer] in await asyncio.gather(*map(service.generate, asked))]

    with Service(engine) as service:
        return asyncio.run(ask(service))


def check(name: str, texts: list[str]) -> None:
    """Compares texts with those that are kept."""
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        kept[name] = texts
        FILE.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    assert texts == kept[name], "If this is meant, the contract of seeds has another version: make golden"


@functools.cache
def expected() -> tuple[list[list[int]], list[list[int]]]:
    """Returns greedy texts of the model itself, and sampled ones of plain decoding."""
    return [TARGET.greedy(p, NUM) for p in PROMPTS], offline(make_engine("none"), SAMPLED, PROMPTS)


@pytest.mark.parametrize("method", MAKERS)
def test_texts_of_seeds_stay(method):
    """Offline drafts may be drawn: then sampled text is the method's own. All others are plain decoding's."""
    greedy, plain = expected()
    assert offline(make_engine(method), GREEDY, PROMPTS) == greedy == served(make_engine(method), GREEDY, PROMPTS)
    assert served(make_engine(method), SAMPLED, PROMPTS) == plain
    engine, letters = make_engine(method), Letters()
    texts = offline(engine, SAMPLED, PROMPTS)
    assert texts == offline(engine, SAMPLED, PROMPTS, batch_size=1)
    check(method, [letters.decode(text) for text in texts])


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "suffix"])
def test_texts_of_the_example_bundles_stay(method, example_bundle):
    engine = speccompile.load(example_bundle(method), threads=1)
    prompts = [engine.encode(json.loads(line)["prompt"])[:40] for line in EXAMPLES.read_text().splitlines()[:4]]
    greedy, sampled = GREEDY[:4], [replace(params, top_k=40) for params in SAMPLED[:4]]
    plain = offline(engine, greedy, prompts, speculative=False)
    assert offline(engine, greedy, prompts) == plain == served(engine, greedy, prompts)
    by_server = served(engine, sampled, prompts)
    assert by_server == offline(engine, sampled, prompts, speculative=False)
    # Drawn drafts are part of their text, and how many there are comes from the costs that the build measured.
    assert offline(engine, sampled, prompts) == offline(engine, sampled, prompts, batch_size=1)
    check(f"example of {method}", [engine.tokenizer.decode(text) for text in [*plain, *by_server]])


EXAMPLES = Path(__file__).parents[2] / "examples/prompts.jsonl"


@pytest.fixture
def example_bundle(e2e_folder, cheap_measurements):
    """Returns a function that builds an example bundle in fp32."""
    from tests.e2e.conftest import MODELS, build_bundle, pair_recipe

    sections = {
        "eagle3": f"{{method: eagle3, model: {MODELS.parent / 'speculators/pycode-eagle3'}}}",
        "suffix": "{method: suffix}",
    }

    def build(method: str) -> Path:
        recipe = pair_recipe("none")
        if method in sections:
            lines = recipe.splitlines()
            recipe = "\n".join([lines[0], f"speculator: {sections[method]}", *lines[2:]]) + "\n"
        return build_bundle(e2e_folder, f"golden-{method}" if method in sections else "pair", recipe)

    return build
