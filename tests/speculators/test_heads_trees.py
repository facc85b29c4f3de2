# SPDX-License-Identifier: Apache-2.0
"""Trees that heads draft in one run: whatever they draft, the text is the target's own, greedy or sampled."""

import numpy as np
import pytest

from speccompile.core import registry
from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.sampling import SamplingParams
from speccompile.core.specs import HIDDEN, START_NODES
from speccompile.graph_kinds.heads import DraftForm, FormOptions
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch
from speccompile.runtime.verifier import Verifier
from tests.lab.decoding import check_texts, finished, num_accepted, random_prompts, sequences_of, warped
from tests.mock_lm import MockLM
from tests.speculators.distribution_check import LEAST, PROMPT, fit_p_value
from tests.speculators.hidden_lm import MockCandidateHeads, MockTarget, MockTreeHeads, OnDevice

TARGET = MockLM(seed=21, sharpness=1.2)
DRAFT = TARGET.blurred(seed=22, blur=0.5)
MAX_SEQ, NUM_HEADS, MAX_DRAFTS = 96, 3, 8
CHEAP = {"target": StepCosts(((1, 10.0), (16, 11.0))), "heads": StepCosts(((1, 0.1),))}
DEAR = {"target": StepCosts(((1, 1.0), (16, 30.0))), "heads": StepCosts(((1, 2.0),))}
CHOICES = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
TREES = ("auto", {"widths": (2, 1, 1)}, CHOICES)
METHODS = ("medusa", "mlp", "prophet")
CASES = [*((method, tree) for method in METHODS for tree in TREES), ("medusa", "chain")]


def make(method, tree, costs=None, slots=8, chunk=5):
    """(verifier, proposer, heads)."""
    made = registry.method(method)
    config = made.Config("heads", tree=tree, num_candidates=3, tree_width=2)
    target = MockTarget(TARGET, slots, MAX_SEQ, headroom=MAX_DRAFTS + 1)
    (job,) = made.graph_jobs(config)
    if isinstance(job.options, FormOptions):
        heads = MockTreeHeads(DRAFT, target, DraftForm.from_options(job.options, NUM_HEADS), slots)
    else:
        heads = MockCandidateHeads(DRAFT, target, NUM_HEADS, job.options.num_candidates, slots)
    context = MethodContext(slots, MAX_SEQ, MAX_DRAFTS, costs or {})
    return Verifier(target, MAX_SEQ, chunk), made.make_proposer(config, {job.name: heads}, context), heads


@pytest.mark.parametrize(("method", "tree"), CASES, ids=str)
def test_greedy_text_is_the_targets_own(method, tree):
    """Costs decide how much is drafted, the batch how slots move: all sizes where most is drafted."""
    prompts = random_prompts(9)
    params = [SamplingParams(max_new_tokens=n) for n in (30, 1, 2, 17, 25, 3, 200, 9, 14)]
    for costs, batch in ((CHEAP, 1), (CHEAP, 3), (CHEAP, 8), (None, 3), (DEAR, 3)):
        verifier, proposer, _ = make(method, tree, costs)
        sequences = finished(verifier, proposer, prompts, params, batch)
        check_texts(TARGET, sequences, prompts, params, MAX_SEQ)
        if costs is CHEAP:
            assert num_accepted(sequences) > 50


@pytest.mark.parametrize(("method", "tree"), CASES, ids=str)
def test_sampled_text_depends_on_the_seed_alone(method, tree):
    """Deterministic drafts leave the text as plain decoding makes it, draw for draw."""
    prompts = random_prompts(6, seed=5)
    params = warped()
    verifier, _, _ = make(method, tree)
    plain = registry.method("none")
    nothing = plain.make_proposer(plain.Config(), {}, MethodContext(8, MAX_SEQ, MAX_DRAFTS))
    texts = [[sequence.tokens for sequence in finished(verifier, nothing, prompts, params, 3)]]
    for batch in (1, 4):
        verifier, proposer, _ = make(method, tree, CHEAP)
        texts.append([sequence.tokens for sequence in finished(verifier, proposer, prompts, params, batch)])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.distribution
# Seeds are fixed; p < 1e-4 happens by chance once in ten thousand choices of them.
@pytest.mark.parametrize(("method", "tree"), [("medusa", "auto"), ("mlp", "auto"), ("prophet", CHOICES)], ids=str)
def test_two_sampled_tokens_follow_the_targets_distribution(method, tree):
    num, prompt, heat, top_k = 1500, list(PROMPT), 0.9, 4
    verifier, proposer, _ = make(method, tree, slots=60)
    verifier.may_read_last = False  # so that the first token comes with drafts, too
    params = [SamplingParams(max_new_tokens=3, temperature=heat, top_k=top_k, seed=s) for s in range(num)]
    sequences = finished(verifier, proposer, [prompt] * num, params, 60)
    assert fit_p_value(sequences, TARGET, (heat, top_k, 1.0), num_tokens=2) > LEAST
    assert num_accepted(sequences) > 0.2 * num


@pytest.mark.parametrize(("method", "tree"), CASES[:3], ids=str)
def test_states_stay_where_the_target_left_them(method, tree):
    verifier, proposer, heads = make(method, tree)
    prompts = [[1, 2, 3], [4, 2], [5, 6], [7, 8, 9, 10, 11, 12]]
    params = [SamplingParams(max_new_tokens=60)] * 4
    waiting = SequenceBatch(sequences_of(prompts, params), 4)
    steps, copies = decode(verifier, proposer, waiting), []
    next(steps)  # the first tokens, which came with the prompts
    for _ in range(6):
        next(steps)
        copies.append(OnDevice.num_copies)
    assert copies == copies[:1] * 6  # prompts are copied, steps are not
    assert heads.num_runs == 6


@pytest.mark.parametrize(("method", "tree"), CASES)
def test_heads_read_the_state_of_each_sequences_last_token_and_no_sibling_is_drafted_twice(method, tree):
    verifier, proposer, heads = make(method, tree, slots=3)
    right, propose, read = heads.run, proposer.propose, []

    def watched_run(feeds, first_slot=0):
        hidden, start = (
            np.asarray(feeds[HIDDEN].array if isinstance(feeds[HIDDEN], OnDevice) else feeds[HIDDEN]),
            feeds[START_NODES],
        )
        read[:] = [heads.target.contexts[int(hidden[b, start[b], 0])].tolist() for b in range(len(start))]
        return right(feeds)

    def watched(batch):
        made = propose(batch)
        for slot, sequence in enumerate(batch.sequences):
            num = int(made.num_nodes[slot])
            if num > 1:
                assert read[slot] == sequence.tokens[:-1]
            drafted = list(zip(made.parents[slot, 1:num].tolist(), made.tokens[slot, 1:num].tolist(), strict=True))
            assert len(set(drafted)) == len(drafted)
        return made

    heads.run, proposer.propose = watched_run, watched
    done = finished(verifier, proposer, random_prompts(5), [SamplingParams(max_new_tokens=25)] * 5, 3)
    assert num_accepted(done) > 20


def test_a_tree_is_longer_than_a_chain():
    prompts, params = random_prompts(8, seed=9, low=3), [SamplingParams(max_new_tokens=60)] * 8
    lengths = {}
    for tree in ("chain", "auto"):
        verifier, proposer, _ = make("medusa", tree)
        sequences = finished(verifier, proposer, prompts, params, 8)
        lengths[tree] = num_accepted(sequences) / sum(
            sequence.stats.json_from_stats()["num_steps"] for sequence in sequences
        )
    assert lengths["auto"] > lengths["chain"] + 0.1


def test_expensive_drafts_are_not_made():
    for method in METHODS:
        verifier, proposer, heads = make(method, CHOICES, DEAR)
        finished(verifier, proposer, [[1, 2, 3]], [SamplingParams(max_new_tokens=30)], 1)
        assert heads.num_runs == 0


def test_a_chain_is_asked_of_heads_that_were_built_for_trees():
    """As `load(bundle, method={"method": "medusa", "tree": "chain"})` does: the graph gives several candidates."""
    verifier, _, heads = make("medusa", "auto", CHEAP)
    method, (prompt, *_) = registry.method("medusa"), random_prompts(1, low=6)
    config = method.Config("heads", tree="chain")
    proposer = method.make_proposer(config, {"heads": heads}, MethodContext(8, MAX_SEQ, MAX_DRAFTS, CHEAP))
    propose, trees = proposer.propose, []
    proposer.propose = lambda batch: trees.append(propose(batch)) or trees[-1]
    for heat in (0.0, 1.0):
        [sequence] = finished(verifier, proposer, [prompt], [SamplingParams(max_new_tokens=40, temperature=heat)], 1)
        assert num_accepted([sequence]) > 5
    assert all(tree.is_chain for tree in trees) and max(tree.nodes for tree in trees) == NUM_HEADS + 1
