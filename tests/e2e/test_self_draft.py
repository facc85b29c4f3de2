# SPDX-License-Identifier: Apache-2.0
"""A target that drafts for itself in 4 bits, on caches, latent caches and recurrent states: the text is its own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speccompile.certificate.verify import STEPS, Options, verify
from speccompile.core import registry
from speccompile.core.jobs import DecoderOptions, GraphJob, MethodContext, SourceContext, StepCosts
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.spec_engine import SpecEngine
from tests import store
from tests.lab.graphs import compile_graph
from tests.method_rows import quantization_of

pytest.importorskip("torch")

MAX_SEQ, MAX_NODES, SLOTS = 60, 10, 4
CHAIN, TREE = {"num_draft_tokens": 3}, {"tree": "auto", "tree_width": 2, "tree_depth": 3}
FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "qwen3_next", "nemotron_h")
HYBRIDS = ("qwen3_5_text", "qwen3_next", "nemotron_h")


def compiled(source: Any, folder: Path, backend: str, **owners: Any) -> Any:
    """Returns a source's graph on a backend, a draft in 4 bits where that has them."""
    model, maker = store.export(source)[0], registry.backend(backend)
    dims = source.dims if source.role == "target" else None
    with store.cheap_measurements():
        built = compile_graph(model, source.spec(), folder, maker, dims, quantization=quantization_of(source, maker))
    return built.open(SLOTS, max_rows=MAX_SEQ + MAX_NODES + 1, owners=owners)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns (family, backend) -> the engines of a target and of its draft."""
    from speccompile.export.decoder_source import DecoderSource
    from tests.speculators import mtp_lab

    made: dict[tuple[str, str], Any] = {}

    def load(family: str, backend: str = "onnxruntime") -> Any:
        if (family, backend) not in made:
            folder = tmp_path_factory.mktemp(family)
            mtp_lab.write_target(folder / "target", family)
            job = GraphJob("target", str(folder / "target"), options=DecoderOptions())
            source = DecoderSource(job, SourceContext("checkpoint", MAX_SEQ, MAX_NODES))
            target = compiled(source, folder / "graphs", backend)
            method = registry.method("self_draft")
            [wanted] = method.graph_jobs(method.Config(tree={"widths": [8]}))
            context = SourceContext("checkpoint", MAX_SEQ, MAX_NODES, source.dims, job)
            draft = registry.find_class(wanted.source)(wanted, context)
            made[family, backend] = target, compiled(draft, folder / "draft", backend, target=target)
        return made[family, backend]

    return load


def engine_of(pair: Any, **fields: Any) -> SpecEngine:
    target, draft = pair
    method, context = registry.method("self_draft"), MethodContext(SLOTS, MAX_SEQ, MAX_NODES)
    proposer = method.make_proposer(method.Config(**fields), {"self_draft": draft}, context)
    return SpecEngine(target, {"self_draft": draft}, proposer, None, context)


def prompts() -> list[list[int]]:
    from tests.speculators.eagle_lab import PROMPTS

    return [*PROMPTS[:5], [4]]


@pytest.mark.parametrize("fields", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_equals_plain_decoding(engines, family, fields):
    """Greedy and, where no text may depend on drafts, sampled; to the end of the cache."""
    target, draft = engines(family)
    if fields is TREE and target.states is not None and not target.states.scores_trees:
        pytest.skip("its convolutions differ in length, so that it scores chains alone")
    assert (draft.states is None) == (family not in HYBRIDS) and draft.spec.own_caches == ()
    engine = engine_of((target, draft), **fields)
    asked = [SamplingParams(max_new_tokens=70 if i == 1 else 24 + i, ignore_eos=True) for i in range(len(prompts()))]
    plain = [r.tokens for r in engine.generate(prompts(), asked, speculative=False, batch_size=1)]
    for batch_size in (1, 3):
        results = engine.generate(prompts(), asked, batch_size=batch_size)
        assert [r.tokens for r in results] == plain
        num_accepted, num_drafts = (sum(r.stats[k] for r in results) for k in ("num_accepted", "num_draft_tokens"))
        assert 30 < num_accepted < num_drafts


@pytest.mark.parametrize("family", HYBRIDS)
def test_drafts_of_recurrent_layers_are_those_of_a_fresh_prompt(engines, family):
    """The states that a draft begins with are the target's, whatever was drafted and refused before."""
    engine, found = engine_of(engines(family), **CHAIN), {}
    propose = engine.proposer.propose

    def proposing(batch: Any) -> Any:
        tree = propose(batch)
        for row, sequence in enumerate(batch.sequences):
            if tree.num_nodes[row] == 4:
                found.setdefault(tuple(sequence.tokens), tree.tokens[row].tolist())
        return tree

    engine.proposer.propose = proposing
    engine.generate(prompts(), SamplingParams(max_new_tokens=24, ignore_eos=True), batch_size=3)
    later = dict(found)
    found.clear()
    anew = [list(text[:-1]) for text in later if len(text) > 1]
    engine.generate(anew, SamplingParams(max_new_tokens=5, ignore_eos=True), batch_size=SLOTS)
    both = [text for text in later if text in found]
    assert len(both) >= 20
    assert [text for text in both if found[text] != later[text]] == []


def test_a_draft_that_begins_with_old_states_drafts_other_tokens(engines):
    """The check above fails where the states are not copied."""
    target, draft = engines("qwen3_5_text")
    engine = engine_of((target, draft), **CHAIN)
    asked = SamplingParams(max_new_tokens=24, ignore_eos=True)
    right = sum(r.stats["num_accepted"] for r in engine.generate(prompts(), asked, batch_size=3))
    copy, draft.states.follow_arrays = draft.states.follow_arrays, lambda owner, num_slots: None
    results = engine.generate(prompts(), asked, batch_size=3)
    draft.states.follow_arrays = copy
    plain = engine.generate(prompts(), asked, speculative=False, batch_size=3)
    assert [r.tokens for r in results] == [r.tokens for r in plain]
    assert sum(r.stats["num_accepted"] for r in results) < 0.7 * right


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_the_reference_backend_drafts_as_well(engines, family):
    """There the draft has the target's own weights: every draft is accepted."""
    engine = engine_of(engines(family, "reference"), **CHAIN)
    asked = SamplingParams(max_new_tokens=8, ignore_eos=True)
    fast, slow = (engine.generate(prompts()[:2], asked, speculative=s, batch_size=2) for s in (True, False))
    assert [r.tokens for r in fast] == [r.tokens for r in slow]
    for result in fast:
        assert result.stats["num_accepted"] >= result.stats["num_draft_tokens"] - 3 > 0


def test_states_of_an_engine_without_an_owner_stay_as_they_are(engines):
    """A probe runs a draft alone."""
    _, draft = engines("qwen3_5_text")
    owner, draft.states.owner = draft.states.owner, None
    before = {name: np.array(array) for name, array in draft.states.arrays.items()}
    draft.states.follow(SLOTS)
    draft.states.owner = owner
    assert all(np.array_equal(array, draft.states.arrays[name]) for name, array in before.items())


def test_a_hybrid_charges_nothing_for_rows_that_the_target_has_read(engines):
    method, costs = registry.method("hybrid"), {"self_draft": StepCosts(((1, 1.0), (64, 9.0)))}
    config = method.Config(drafters=({"method": "self_draft"}, {"method": "suffix"}))
    context = MethodContext(SLOTS, MAX_SEQ, MAX_NODES, costs)
    own = method.make_proposer(config, {"self_draft": engines("llama")[1]}, context).drafters[0].costs
    assert own.ms(1, 2.0, num_missed=50) == own.ms(1, 2.0, num_missed=0) == 3.0


# A hybrid of attention and recurrent layers, one of convolutions, two mixtures; windows, sinks, norms of heads.
CERTIFIED = ("llama3", "qwen3", "phi3", "gpt-oss", "qwen3-moe", "qwen3.5", "lfm2")
NEEDS_LETTERS = "grammar"  # tokens of these are w0, w1, ...


@pytest.mark.parametrize("name", CERTIFIED)
def test_the_certificate_of_a_bundle_passes(tmp_path, name):
    """The product's own checks, on a bundle of its own build, with drafts that were kept and drafts that were not."""
    from tests.e2e.conftest import build_bundle
    from tests.export.families import CONFIGS, VOCAB
    from tests.export.harness import make_checkpoint
    from tests.export.hybrids import HYBRIDS
    from tests.pipeline import fakes

    make_checkpoint({**CONFIGS, **HYBRIDS}[name], tmp_path / "target")
    (tmp_path / "target/tokenizer.json").write_text(json.dumps(fakes.tokenizer(VOCAB)))
    recipe = (
        f"target: {{model: {tmp_path / 'target'}, quantization: none}}\nspeculator: {{method: self_draft}}\n"
        "engine: {max_batch_size: 4, max_seq_len: 60, max_draft_nodes: 8, threads: 1}\n"
    )
    bundle = build_bundle(tmp_path, "bundle", recipe)
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, VOCAB, length).tolist() for length in (9, 2, 17, 4, 6, 12, 3, 8)]
    certificate = verify(bundle, Options(texts, num_tokens=24, num_samples=150))
    found = {check["name"]: check for check in certificate["checks"]}
    assert list(found) == list(STEPS) and found.pop(NEEDS_LETTERS)["status"] == "not run"
    assert {n: c["status"] for n, c in found.items()} == dict.fromkeys(found, "passed"), found
    drafting = [run for run in found["greedy"]["runs"] if run["run"].startswith("drafts, batch")]
    assert len(drafting) == 2
    for run in drafting:
        assert 20 < run["num_accepted"] < run["num_draft_tokens"] - 20 and run["num_equal"] == len(texts)
