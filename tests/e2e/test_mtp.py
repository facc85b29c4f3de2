# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction modules through the engine: every draft is the one transformers' own module would make."""

import json

import numpy as np
import pytest

import speccompile
from speccompile.core import registry
from speccompile.core.jobs import DecoderOptions, GraphJob, MethodContext, SourceContext
from speccompile.core.sampling import SamplingParams
from speccompile.core.specs import FEATURE_NODES, FEATURES, LENGTHS, TOKENS
from speccompile.core.tree import Verdict
from speccompile.runtime.requests import Request
from speccompile.runtime.sequences import RequestHandle
from speccompile.runtime.service import make_scheduler, open_outputs
from speccompile.runtime.spec_engine import SpecEngine
from tests.e2e.conftest import build_bundle
from tests.e2e.test_tree_cache import caches_of
from tests.greedy_check import differing

pytest.importorskip("torch")

MAX_SEQ, MAX_NODES, SLOTS = 60, 6, 8
LAST = 2  # the target's last layer
NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    from tests.speculators import mtp_lab as lab

    folder = tmp_path_factory.mktemp("modules")
    lab.write_target(folder / "target", "llama")
    lab.write_learnt(folder / "module", folder / "target")
    return folder


@pytest.fixture(scope="module")
def oracle(checkpoints):
    from tests.speculators import mtp_lab as lab

    config = json.loads((checkpoints / "module/config.json").read_text())
    module = lab.MtpModule(config, "sdpa").to_empty(device="cpu")
    held = lab.load_file(checkpoints / "module/model.safetensors")
    module.load_state_dict({name.removeprefix("mtp."): tensor for name, tensor in held.items()})
    return lab.Oracle(checkpoints / "target", module, intermediate_size=config["layer_config"]["intermediate_size"])


@pytest.fixture(scope="module")
def engines(checkpoints):
    """Returns name -> engine: the target with both hidden states, the module, and the module with swapped halves."""
    from speccompile.export.decoder_source import DecoderSource
    from tests.speculators.eagle_lab import compiled

    job = GraphJob("target", str(checkpoints / "target"), options=DecoderOptions(hidden=True, hidden_layers=(LAST,)))
    source = DecoderSource(job, SourceContext("checkpoint", MAX_SEQ, MAX_NODES))
    sizes, made, method = {"slots": SLOTS, "rows": MAX_SEQ + MAX_NODES + 1}, {}, registry.method("mtp")
    made["target"] = compiled(source, checkpoints, **sizes)[0]
    context = SourceContext("checkpoint", MAX_SEQ, MAX_NODES, source.dims, job)
    for name, fields in (("draft", {}), ("swapped", {"concat": "hidden_first"})):
        (wanted,) = method.graph_jobs(method.Config(str(checkpoints / "module"), **fields))
        draft = registry.find_class(wanted.source)(wanted, context)
        made[name] = compiled(draft, checkpoints / name, **sizes)[0]
    return made


def load(engines, graph="draft", **fields):
    method, context = registry.method("mtp"), MethodContext(SLOTS, MAX_SEQ, MAX_NODES)
    drafts = {"draft": engines[graph]}
    config = method.Config("", **{"num_draft_tokens": NUM_DRAFTS, **fields})
    return SpecEngine(engines["target"], drafts, method.make_proposer(config, drafts, context), None, context)


def prompts():
    from tests.speculators.eagle_lab import PROMPTS

    return PROMPTS


def record(engine):
    """Returns the list to which every proposal adds (text with the root, drafts) of each slot."""
    found, propose = [], engine.proposer.propose

    def proposing(batch):
        tree = propose(batch)
        for row, sequence in enumerate(batch.sequences):
            drafts = tree.tokens[row, 1 : int(tree.num_nodes[row])].tolist()
            found.append((tuple(sequence.tokens), tuple(drafts)))
        return tree

    engine.proposer.propose = proposing
    return found


def wrong_of(oracle, found):
    """Returns how many recorded drafts are not the oracle's, and how many there are."""
    by_text = {text: oracle.drafts(list(text), NUM_DRAFTS) for text in {text for text, drafts in found if drafts}}
    pairs = [(by_text[text][: len(drafts)], list(drafts)) for text, drafts in found if drafts]
    return sum(right != drafts for right, drafts in pairs), len(pairs)


def decode(engine, batch_size=4, num=20):
    results = engine.generate(prompts(), SamplingParams(max_new_tokens=num, ignore_eos=True), batch_size=batch_size)
    return results, sum(r.stats["num_accepted"] for r in results)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_draft_is_the_oracles(engines, oracle, batch_size):
    """Prompts, whole chains accepted, first drafts refused, ragged batches that end and begin."""
    engine = load(engines)
    found = record(engine)
    results, num_accepted = decode(engine, batch_size)
    plain = engine.generate(prompts(), SamplingParams(max_new_tokens=20, ignore_eos=True), speculative=False)
    assert [r.tokens for r in results] == [r.tokens for r in plain]
    wrong, total = wrong_of(oracle, found)
    assert wrong == 0 and total > 60 and num_accepted > 40
    longest = [r.stats for r in results]
    assert sum(s["num_draft_tokens"] for s in longest) > num_accepted  # some were refused


def test_a_prompt_in_chunks_carries_the_last_state_over(engines, oracle):
    """Chunks of four tokens, read between the steps of other sequences."""
    engine = load(engines)
    found = record(engine)
    scheduler = make_scheduler(engine, prefill_chunk=4)
    texts = [[(5 * i + k * k) % 40 for k in range(11 + 3 * i)] for i in range(4)]
    for number, text in enumerate(texts):
        asked = SamplingParams(max_new_tokens=8, ignore_eos=True)
        handle = RequestHandle(number, 0.0)
        open_outputs(handle, [Request(text, asked)], engine, "auto")
        scheduler.add(handle)
    while scheduler.has_work:
        for _ in scheduler.step():
            pass
    wrong, total = wrong_of(oracle, found)
    assert wrong == 0 and total >= len(texts) * 2


def read_unshifted(engine):
    """Reads the token of every hidden state's own position in place of the next one."""
    rows = engine.proposer.rows
    read = rows._read
    rows._read = lambda slot, tokens, features: read(slot, [0, *tokens[:-1]] if tokens else tokens, features)


def keep_own_rows(engine):
    """Keeps the rows that accepted drafts wrote with the module's own states."""
    rows = engine.proposer.rows
    keep = rows.pending.keep

    def keeping(slots, verdict, outputs):
        written = np.minimum(verdict.num_accepted, NUM_DRAFTS - 1)
        path = np.stack([np.append(row[num:], row[:num]) for row, num in zip(verdict.path, written, strict=True)])
        for slot, num in enumerate(written.tolist()):
            rows.lengths[slot] += num
        keep(slots, Verdict(path, verdict.num_accepted - written, verdict.next_token), outputs)

    rows.pending.keep = keeping


MUTANTS = {
    "the state before the final norm": ({"target_hidden": LAST}, "draft", None),
    "the halves of the projection swapped": ({}, "swapped", None),
    "tokens of a prompt not shifted": ({}, "draft", read_unshifted),
    "rows of own states kept": ({}, "draft", keep_own_rows),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_drafts_otherwise_and_worse(engines, oracle, name):
    """What is silent in decoding (the text stays the target's own) is seen by the oracle and in the acceptance."""
    fields, graph, change = MUTANTS[name]
    sound, num_right = decode(load(engines))
    engine = load(engines, graph, **fields)
    if change is not None:
        change(engine)
    found = record(engine)
    results, num_accepted = decode(engine)
    assert [r.tokens for r in results] == [r.tokens for r in sound]
    wrong, total = wrong_of(oracle, found)
    assert wrong > 0.05 * total
    assert num_accepted < num_right


def test_rows_after_rollbacks_are_those_of_a_fresh_prompt(engines, oracle):
    """Nothing of refused drafts or own states is left in the rows that later drafts see."""
    engine = load(engines)
    rows, draft = engine.proposer.rows, engines["draft"]
    for text in prompts()[:3]:
        asked = SamplingParams(max_new_tokens=24, ignore_eos=True)
        [result] = engine.generate([text], asked, batch_size=1)
        assert 0 < result.stats["num_accepted"] < result.stats["num_draft_tokens"]
        num, whole = rows.lengths[0], [*text, *result.tokens]
        assert num >= len(text) + 12
        held = caches_of(draft)[:, 0, :, :num].copy()
        draft.reset()
        features = np.asarray(oracle.hidden(whole[:num]).numpy(), np.float32)
        feeds = {TOKENS: np.array([whole[1 : num + 1]]), LENGTHS: np.array([0]), FEATURES: features}
        draft.run({**feeds, FEATURE_NODES: np.arange(num)[None]})
        fresh = caches_of(draft)[:, 0, :, :num]
        assert np.abs(fresh - held).max() < 1e-5 * np.abs(fresh).max()


@pytest.mark.distribution
@pytest.mark.parametrize("heat", [0.5, 0.8, 1.2])
def test_two_sampled_tokens_follow_the_targets_distribution(engines, checkpoints, heat):
    """Drawn drafts over the target's whole vocabulary; the seeds are fixed."""
    from tests.e2e.two_tokens import exact_dist, fit_p_value

    num, prompt, top_k = 1200, prompts()[0], 6
    params = [SamplingParams(max_new_tokens=3, temperature=heat, top_k=top_k, seed=s) for s in range(num)]
    results = load(engines).generate([prompt] * num, params, batch_size=8)
    assert fit_p_value(results, exact_dist(checkpoints / "target", prompt, heat, top_k)) > 1e-4
    assert sum(r.stats["num_accepted"] for r in results) > 20


RECIPE = """\
target: {{model: {target}}}
speculator: {{method: mtp, {fields}num_draft_tokens: 2}}
engine: {{backend: onnxruntime, max_batch_size: 4, max_seq_len: 64, max_draft_nodes: 4, threads: 1}}
"""


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3", "qwen3_5_text", "qwen3_next"])
def test_a_module_in_the_targets_own_files_is_built_without_being_named(family, tmp_path):
    """From the recipe to text, which is transformers' own, and to its drafts; recurrent targets among them."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.speculators import mtp_lab as lab

    target = lab.write_target(tmp_path / "target", family)
    plain = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    _, module = lab.random_module(target)
    lab.add_to_target(target, module, numbered=family == "glm4_moe")
    bundle = build_bundle(tmp_path, family, RECIPE.format(target=target, fields=""))
    engine = speccompile.load(bundle, verify=False)
    found = record(engine)
    for batch_size in (1, 4):
        results = engine.generate(prompts(), SamplingParams(max_new_tokens=12, ignore_eos=True), batch_size=batch_size)
        assert {len(r.tokens) for r in results} == {12}
        assert differing(plain, prompts(), [r.tokens for r in results]) == []
        assert sum(r.stats["num_draft_tokens"] for r in results) > 50
    assert wrong_of(lab.Oracle(target, module), found)[0] == 0
    if family == "glm4_moe":
        again = build_bundle(tmp_path, "named", RECIPE.format(target=target, fields=f"model: {target}, "))
        digests = [json.loads((built / "manifest.json").read_text())["graphs"]["draft"] for built in (bundle, again)]
        assert digests[0] == digests[1]
