# SPDX-License-Identifier: Apache-2.0
"""A tiny target with EAGLE drafters on ONNX Runtime: whatever is drafted, the text is the target's own.

test_methods.py has chains, growing trees and the reference backend.
"""

from dataclasses import replace

import numpy as np
import pytest

from speccompile.core import registry
from speccompile.core.jobs import DecoderOptions, GraphJob, MethodContext, SourceContext
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.control import FixedLength
from speccompile.runtime.requests import Request
from speccompile.runtime.sequences import RequestHandle
from speccompile.runtime.service import make_scheduler, open_outputs
from speccompile.runtime.spec_engine import SpecEngine
from tests import store
from tests.method_rows import ROWS

METHODS = ("eagle3", "eagle")
TREES = {"chain": {"tree": "chain"}, "auto": {"tree": "auto"}, "fixed": {"tree": {"widths": [2, 2, 1]}}}
MAX_SEQ, MAX_NODES = 60, 10


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    pytest.importorskip("torch")
    from tests.speculators import eagle_lab as lab

    folder = tmp_path_factory.mktemp("eagle")
    target = lab.write_target(folder / "target")
    for name in ("eagle3", "eagle"):
        store.write_checkpoint(ROWS[name].write, folder / name, target)
    return folder


@pytest.fixture(scope="module")
def engines(checkpoints):
    """By name, all graphs: one target for both methods, drafts for chains and trees."""
    from speccompile.core.registry import find_class
    from speccompile.export.decoder_source import DecoderSource
    from tests.speculators import eagle_lab as lab

    target = GraphJob(
        "target", str(checkpoints / "target"), options=DecoderOptions(hidden=True, hidden_layers=lab.STREAMS)
    )
    source = DecoderSource(target, SourceContext("checkpoint", MAX_SEQ, MAX_NODES))
    context = SourceContext("checkpoint", MAX_SEQ, MAX_NODES, source.dims, target)
    sizes = {"slots": 8, "rows": MAX_SEQ + MAX_NODES + 1}
    made = {"target": lab.compiled(source, checkpoints, **sizes)[0]}
    for method in METHODS:
        chosen = registry.method(method)
        for job in chosen.graph_jobs(chosen.Config(str(checkpoints / method), tree={"widths": [8]})):
            source = find_class(job.source)(job, context)
            made[f"{method}.{job.name}"] = lab.compiled(source, checkpoints / method, **sizes)[0]
    return made


def load(engines, method, **options):
    """Returns an engine whose proposer knows no costs: on a target as small as this one nothing would be drafted."""
    chosen, context = registry.method(method), MethodContext(8, MAX_SEQ, MAX_NODES)
    drafts = {name.partition(".")[2]: engine for name, engine in engines.items() if name.startswith(f"{method}.")}
    proposer = chosen.make_proposer(chosen.Config("", **options), drafts, context)
    return SpecEngine(engines["target"], drafts, proposer, None, context)


def prompts():
    from tests.speculators.eagle_lab import PROMPTS

    return PROMPTS


def greedy(num):
    return [SamplingParams(max_new_tokens=num + 3 * i) for i in range(len(prompts()))]


def tokens(results):
    return [r.tokens for r in results]


def accepted(results):
    return sum(r.stats["num_accepted"] for r in results)


@pytest.fixture(scope="module")
def plain(engines):
    """Returns the target's own greedy text, alone and without drafts."""
    return tokens(load(engines, "eagle3").generate(prompts(), greedy(24), speculative=False, batch_size=1))


@pytest.mark.parametrize("method", METHODS)
def test_a_tree_is_longer_than_its_chain(engines, method):
    lengths = {}
    for tree in ("chain", "auto"):
        results = load(engines, method, **TREES[tree]).generate(prompts(), greedy(24), batch_size=1)
        lengths[tree] = np.mean([r.stats["mean_acceptance_length"] for r in results])
    assert lengths["auto"] > lengths["chain"] > 1.02


@pytest.mark.parametrize("method", METHODS)
def test_neither_text_nor_drafts_of_a_tree_depend_on_the_batch(engines, plain, method):
    """Ragged batches, moves and pending features change no draft: each sequence takes the steps it takes alone."""
    engine, counts = load(engines, method, **TREES["fixed"]), []
    for batch_size in (1, 3, 8):
        fast = engine.generate(prompts(), greedy(24), batch_size=batch_size)
        assert tokens(fast) == plain
        assert accepted(fast) >= 10  # of about 250 tokens that the drafter has seen
        counts.append([r.stats["num_steps"] for r in fast])
    assert counts[0] == counts[1] == counts[2]
    assert len(set(plain[0])) > 5


@pytest.mark.parametrize("options", [TREES["chain"], {**TREES["chain"], "num_draft_tokens": 3}, TREES["fixed"], {}])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_text_in_any_batch(engines, method, options):
    engine = load(engines, method, **options)
    heats = (1.0, 0.7, 0.0, 1.2, 0.9, 1.0, 0.5, 1.0)
    params = [
        SamplingParams(max_new_tokens=25, temperature=t, top_p=0.9 if i % 2 else 1.0, top_k=9 * (i % 3), seed=i)
        for i, t in enumerate(heats)
    ]
    alone = engine.generate(prompts(), params, batch_size=1)
    assert accepted(alone) > 0
    for batch_size in (3, 8):
        assert tokens(engine.generate(prompts(), params, batch_size=batch_size)) == tokens(alone)


def test_a_cache_that_fills_up_ends_where_plain_decoding_ends(engines):
    params = SamplingParams(max_new_tokens=500)
    engine = load(engines, "eagle3", **TREES["fixed"])
    fast, slow = (engine.generate(prompts(), params, speculative=s, batch_size=5) for s in (True, False))
    assert tokens(fast) == tokens(slow)
    assert {r.finish_reason for r in fast} == {"cache_full"}


def test_features_wait_while_nothing_is_drafted(engines):
    """Steps without drafts leave no hole: afterwards the drafts are those of a run without pauses."""
    engine = load(engines, "eagle3", **TREES["fixed"])
    steady = engine.generate([prompts()[0]], greedy(24)[:1])[0]
    drafts, plain = engine.proposer.likeliest, registry.method("none").make_proposer(None, {}, engine.context)
    propose, num_steps = drafts.propose, []

    def sometimes(batch):
        num_steps.append(1)
        return (plain if len(num_steps) <= 14 else drafts_again)(batch)

    plain, drafts_again = plain.propose, propose
    drafts.propose = sometimes
    paused = engine.generate([prompts()[0]], greedy(24)[:1])[0]
    assert paused.tokens == steady.tokens
    assert paused.stats["num_steps"] < 24 and paused.stats["num_accepted"] == 23 - paused.stats["num_steps"] > 0


class SomeExpected(FixedLength):
    """Every other new sequence has no draft."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def expects_drafts(self, num_active):
        self.num_asked += 1
        return self.num_asked % 2 == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tree", ["chain", "fixed"])
def test_sequences_without_a_draft_decode_beside_those_with_one(engines, plain, method, tree):
    engine = load(engines, method, **TREES[tree])
    engine.controller = SomeExpected()
    for batch_size in (1, 3, 8):
        fast = engine.generate(prompts(), greedy(24), batch_size=batch_size)
        assert tokens(fast) == plain
        drafted = [r.stats["num_draft_tokens"] > 0 for r in fast]
        assert 0 < sum(drafted) < len(drafted)


def test_a_scheduler_reads_no_prompt_with_a_draft_that_will_not_draft(engines, plain):
    engine = load(engines, "eagle3", **TREES["chain"])
    scheduler = make_scheduler(engine, FixedLength(0), keep_prefixes=True)
    done, handles = {}, []
    drafts = engine.engines[1:]
    runs = [draft.run for draft in drafts]
    try:
        for draft in drafts:
            draft.run = None  # would be called in vain
        for num, (prompt, params) in enumerate(zip(prompts(), greedy(24), strict=True)):
            handles.append(RequestHandle(num, 0.0))
            open_outputs(handles[-1], [Request(prompt, params)], engine, "auto")
            scheduler.add(handles[-1])
        while scheduler.has_work:
            for handle, step_output in scheduler.step():
                done.setdefault(handle.number, []).extend(step_output.tokens)
    finally:
        for draft, run in zip(drafts, runs, strict=True):
            draft.run = run
    assert [done[num] for num in range(len(handles))] == plain


def test_a_prompt_whose_prefix_was_read_without_a_draft_is_read_anew_by_one(engines):
    engine = load(engines, "eagle3", **TREES["chain"])
    planner = FixedLength(0)
    prompt, params = [17] * 9 + 2 * prompts()[0], SamplingParams(max_new_tokens=20)
    [right] = tokens(engine.generate([prompt], params, speculative=False))
    scheduler, texts, reused = make_scheduler(engine, planner), [], []
    for num, limit in enumerate((0, 0, None, None)):
        planner.limit = limit
        handle = RequestHandle(num, 0.0)
        open_outputs(handle, [Request(prompt, params)], engine, "auto")
        scheduler.add(handle)
        outputs = []
        while scheduler.has_work:
            outputs += [step_output for _, step_output in scheduler.step()]
        texts.append([token for step_output in outputs for token in step_output.tokens])
        reused.append(outputs[-1].stats["num_reused_tokens"])
        assert (outputs[-1].stats["num_draft_tokens"] > 0) == (limit is None)
    assert texts == [right] * 4
    assert reused[0] == reused[2] == 0 and reused[1] > reused[3] > 0


def shifted(tree):
    """Returns the tree with distributions that its tokens were not drawn from."""
    dists = tree.draft_probs
    return tree if dists is None else replace(tree, draft_probs=np.roll(dists, 1, axis=2))


@pytest.mark.distribution
# The seed is fixed; p < 1e-4 happens by chance once in ten thousand choices of it.
@pytest.mark.parametrize(
    ("options", "is_wrong"), [(TREES["fixed"], False), (TREES["chain"], False), (TREES["fixed"], True)]
)
def test_two_sampled_tokens_follow_the_targets_distribution(engines, checkpoints, options, is_wrong):
    """Draft probs over the draft's vocabulary reach acceptance over the target's; shifted ones would be noticed."""
    from tests.e2e.two_tokens import exact_dist, fit_p_value

    num = 400 if is_wrong else 1600  # p of the wrong ones is 9e-53
    prompt, heat, top_k = prompts()[0], 0.8, 6
    engine = load(engines, "eagle3", **options)
    if is_wrong:
        propose = engine.proposer.propose
        engine.proposer.propose = lambda batch: shifted(propose(batch))
    params = [SamplingParams(max_new_tokens=3, temperature=heat, top_k=top_k, seed=s) for s in range(num)]
    results = engine.generate([prompt] * num, params, batch_size=8)
    p_value = fit_p_value(results, exact_dist(checkpoints / "target", prompt, heat, top_k))
    if is_wrong:
        assert p_value < 1e-4
        return
    assert p_value > 1e-4
    assert 20 < accepted(results) < sum(r.stats["num_draft_tokens"] for r in results)
