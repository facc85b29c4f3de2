# SPDX-License-Identifier: Apache-2.0
"""Hybrids: the example pair, greedy and drawn, and drafts with the bits of a prompt that was read anew."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

import speccompile
from speccompile.core.jobs import StepCosts
from speccompile.core.sampling import SamplingParams
from speccompile.recipe.model_recipe import ModelOptions, recipe_from_model
from speccompile.runtime.loop import read_prompts, run_step
from speccompile.runtime.sequences import SequenceBatch
from speccompile.speculators.hybrid import proposer as proposer_module
from tests.e2e.conftest import MODELS, build_bundle
from tests.e2e.test_methods import prompts
from tests.greedy_check import differing

torch = pytest.importorskip("torch")

# recipes/pycode-hybrid-mtp.yaml, with fewer rows.
RECIPE = (
    f"target: {{model: {MODELS / 'pycode-hybrid'}}}\n"
    "speculator: {method: mtp, num_draft_tokens: 2}\n"
    "engine: {backend: onnxruntime, max_batch_size: 8, max_seq_len: 64, max_draft_nodes: 4, threads: 1}\n"
)
NUM, TOP_K = 800, 6
NUM_WRONG = 200  # p is 9e-21 then


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return build_bundle(tmp_path_factory.mktemp("hybrid"), "pair", RECIPE)


def test_greedy_text_is_transformers_own(bundle, monkeypatch):
    from transformers import AutoModelForCausalLM

    # No clock decides to draft.
    monkeypatch.setattr("speccompile.runtime.spec_engine.controller_of", lambda proposer: None)
    engine = speccompile.load(bundle, verify=False)
    prompts = [engine.encode(text) for text in ("def read(path):\n    ", "class Stack:\n", "import os\n", "for i in")]
    model = AutoModelForCausalLM.from_pretrained(MODELS / "pycode-hybrid", dtype=torch.float32).eval()
    asked = SamplingParams(max_new_tokens=40, ignore_eos=True)
    for batch_size in (1, 4):
        results = engine.generate(prompts, asked, batch_size=batch_size)
        assert differing(model, prompts, [result.tokens for result in results]) == []
        assert sum(result.stats["num_accepted"] for result in results) > 20


def shifted(tree):
    """Returns the tree with distributions that its tokens were not drawn from."""
    return replace(tree, draft_probs=np.roll(tree.draft_probs, 1, axis=2))


@pytest.mark.distribution
@pytest.mark.parametrize(("heat", "is_wrong"), [(0.8, False), (1.2, True)])
def test_two_sampled_tokens_follow_the_targets_distribution(bundle, heat, is_wrong):
    """Drawn drafts of the module over a target with recurrent states; the seeds are fixed."""
    from tests.e2e.two_tokens import exact_dist, fit_p_value

    engine = speccompile.load(bundle, verify=False)
    if is_wrong:
        propose = engine.proposer.propose
        engine.proposer.propose = lambda batch: shifted(propose(batch))
    prompt = engine.encode("def read(path):\n    ")
    num = NUM_WRONG if is_wrong else NUM
    params = [SamplingParams(max_new_tokens=3, temperature=heat, top_k=TOP_K, seed=seed) for seed in range(num)]
    results = engine.generate([prompt] * num, params, batch_size=8)
    p_value = fit_p_value(results, exact_dist(MODELS / "pycode-hybrid", prompt, heat, TOP_K))
    num_accepted = sum(result.stats["num_accepted"] for result in results)
    assert (p_value < 1e-4) is is_wrong, p_value
    assert is_wrong or NUM / 4 < num_accepted < sum(result.stats["num_draft_tokens"] for result in results)


def test_the_default_of_a_float_target_changes_no_text(tmp_path, monkeypatch):
    """Its own weights in 4 bits on the states and caches of the target, its module, and lookups, whichever draft."""
    monkeypatch.setattr("speccompile.speculators.self_draft.checkpoint.MIN_BYTES", 0)
    settings = ("engine.max_batch_size=4", "engine.max_seq_len=64", "engine.max_draft_nodes=4", "engine.threads=1")
    options = ModelOptions(settings=("target.quantization=none", *settings))
    section = recipe_from_model(str(MODELS / "pycode-hybrid"), options).speculator.model_dump()
    assert [d["method"] for d in section["drafters"]] == ["self_draft", "mtp", "suffix"]
    section["drafters"][0]["min_gain"] = 1e-6  # so small a target hardly gains
    section["drafters"][2]["num_draft_tokens"] = 4
    recipe = RECIPE.replace("{method: mtp, num_draft_tokens: 2}", json.dumps(section))
    bundle = build_bundle(tmp_path, "all", recipe)
    # Drafts cost nothing, whatever a busy machine measured.
    monkeypatch.setattr(StepCosts, "from_json", classmethod(lambda cls, record: cls()))
    engine = speccompile.load(bundle, verify=False)
    engine.controller = None
    rng, used = random.Random(4), set()

    def choose(known, num, offers, scores):
        better = [
            i for i, o in enumerate(offers) if any(more > less for less, more in zip(known, o.expected, strict=True))
        ]
        used.add(taken := rng.choice([-1, *better]))
        return taken

    monkeypatch.setattr(proposer_module, "choose", choose)
    prompts = [engine.encode(text) for text in ("def read(path):\n    ", "class Stack:\n", "import os\n", "for i in")]
    for heat in (0.0, 0.8):
        asked = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=heat, seed=5)
        plain = [r.tokens for r in engine.generate(prompts, asked, batch_size=1, speculative=False)]
        for batch_size in (1, 4):
            results = engine.generate(prompts, asked, batch_size=batch_size)
            assert [r.tokens for r in results] == plain
            assert sum(r.stats["num_accepted"] for r in results) > 20
    assert used == {-1, 0, 1}


NUM_STEPS = 9


def next_drafts(engine, watched, batch):
    """Returns what the watched engine gives in the first run of a step in which it drafts."""
    seen = []
    run = watched.run

    def record(feeds, first_slot=0):
        outputs = run(feeds, first_slot)
        seen.append({name: np.array(value) for name, value in outputs.items()})
        return outputs

    watched.run = record
    for sequence in batch.sequences:
        sequence.plan(engine.verifier.max_seq_len)
    tree = engine.proposer.propose(batch)
    del watched.run
    return tree, seen[0]


def test_a_draft_with_caches_of_its_own_is_charged_for_what_it_missed(lab):
    rising = StepCosts(((1, 1.0), (64, 9.0)))
    [(_, own)] = lab("hybrid", "chain", "onnxruntime", rising).proposer._costly
    assert own.ms(1, 2.0, num_missed=50) > own.ms(1, 2.0, num_missed=0)


@pytest.mark.parametrize("form", ["chain", "tree"])
def test_the_next_drafts_have_the_bits_of_a_prompt_that_was_read_anew(lab, monkeypatch, form):
    engine = lab("hybrid", form, "onnxruntime")
    [watched] = engine.engines[1:]
    rng, used = random.Random(3), []
    monkeypatch.setattr(proposer_module, "choose", lambda known, num, offers, scores: rng.randrange(-1, len(offers)))
    asked = SamplingParams(max_new_tokens=60, ignore_eos=True)
    for prompt in prompts()[:3]:
        engine.reset()
        batch = SequenceBatch([engine.make_sequence(0, prompt, asked, False)], 1)
        read_prompts(engine.verifier, engine.proposer, batch)
        for _ in range(NUM_STEPS):
            run_step(engine.verifier, engine.proposer, batch)
            used += engine.proposer._picks
        text = list(batch.sequences[0].tokens)
        monkeypatch.setattr(proposer_module, "choose", lambda known, num, offers, scores: 0)
        monkeypatch.setattr(engine.proposer, "_free", [])
        tree, switched = next_drafts(engine, watched, batch)
        engine.reset()
        anew = SequenceBatch([engine.make_sequence(0, text[:-1], asked, False)], 1)
        read_prompts(engine.verifier, engine.proposer, anew)
        assert anew.sequences[0].tokens == text  # the last token came with the prompt
        tree_anew, read = next_drafts(engine, watched, anew)
        monkeypatch.undo()
        monkeypatch.setattr(
            proposer_module, "choose", lambda known, num, offers, scores: rng.randrange(-1, len(offers))
        )
        # How many drafts a tree has depends on what was learned of their acceptance.
        assert tree.nodes > 1 and tree_anew.nodes > 1
        for name in ("candidates", "candidate_probs"):
            first, second = switched[name][:, -1], read[name][:, -1]
            assert first.tobytes() == second.tobytes() or (form == "tree" and np.allclose(first, second, rtol=2e-3)), (
                name
            )
    assert set(used) >= {0, 1}
