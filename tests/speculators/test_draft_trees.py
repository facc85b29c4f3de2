# SPDX-License-Identifier: Apache-2.0
"""Trees of a small model over mock engines: the target's text and distribution, the draft's cache, and refusals."""

import numpy as np
import pytest

from speccompile.core import acceptance
from speccompile.core.jobs import DecoderOptions, MethodContext, StepCosts
from speccompile.core.sampling import SamplingParams, warp
from speccompile.errors import RecipeError
from speccompile.graph_kinds.decoder import VocabCandidateOptions
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from speccompile.runtime.verifier import Verifier
from speccompile.speculators.draft_model.config import DraftModelConfig, DraftModelMethod
from tests.lab.decoding import finished, greedy_batch, num_accepted
from tests.mock_lm import VOCAB, MockEngine, MockLM
from tests.speculators.distribution_check import LEAST, decode_mixed, mixed_p_value

TARGET = MockLM(seed=1)
DRAFT = TARGET.blurred(seed=2, blur=0.8)
ROWS, NODES = 96, 10
COSTS = {"target": StepCosts(((1, 10.0), (4, 10.5), (16, 16.0))), "draft": StepCosts(((1, 0.2), (16, 0.4)))}
PROMPTS = [[3], [1, 2, 3], [5] * 20, [7, 8], [9] * 60]
TREES = ("auto", {"widths": [2, 2, 1]}, [[0], [2], [0, 1], [0, 1, 0], [0, 1, 0, 0]], {"widths": [1, 1, 1]})


def make_proposer(tree, slots=1, costs=None, rows=ROWS, **fields):
    context = MethodContext(slots, ROWS, NODES, costs or {}, {"draft": rows})
    engine = MockEngine(DRAFT, "draft", slots, rows, headroom=NODES + 1)
    return DraftModelMethod().make_proposer(
        DraftModelConfig("d", tree=tree, num_candidates=4, **fields), {"draft": engine}, context
    )


def run(proposer, slots, params):
    verifier = Verifier(MockEngine(TARGET, "target", slots, ROWS, headroom=NODES + 1), ROWS)
    return finished(verifier, proposer, PROMPTS, params, slots)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("costs", [None, COSTS])
def test_greedy_text_is_the_targets_own_to_the_end_of_the_cache(tree, slots, costs):
    params = [SamplingParams(max_new_tokens=60 - 7 * i) for i in range(len(PROMPTS))]
    done = run(make_proposer(tree, slots, costs), slots, params)
    for sequence, prompt in zip(done, PROMPTS, strict=True):
        assert sequence.tokens[len(prompt) :] == TARGET.greedy(
            prompt, min(60 - 7 * sequence.index, ROWS - len(prompt) + 1)
        )
    steps = sum(sum(sequence.stats.outcomes.values()) for sequence in done)
    assert sum(sequence.stats.num_tokens for sequence in done) > 1.8 * steps


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("rows", [40, 12, 3])
def test_a_draft_with_fewer_rows_than_the_target_drafts_as_long_as_it_can(tree, rows):
    proposer = make_proposer(tree, 2, rows=rows)
    done = run(proposer, 2, [SamplingParams(max_new_tokens=36)] * len(PROMPTS))
    for sequence, prompt in zip(done, PROMPTS, strict=True):
        assert sequence.tokens[len(prompt) :] == TARGET.greedy(prompt, 36)
    drafted = [sequence.stats.num_draft_tokens for sequence in done]
    assert drafted[0] > 0 and drafted[4] == 0


@pytest.mark.parametrize("tree", TREES)
def test_every_node_is_the_drafts_own_candidate_after_its_path(tree):
    """The draft sees all ancestors of a node, and nothing of other branches or slots."""
    proposer = make_proposer(tree, slots=3)
    batch = greedy_batch(*PROMPTS[1:4])
    for slot, sequence in enumerate(batch.sequences):
        proposer.start(slot, sequence)
    made = proposer.propose(batch)
    for slot, sequence in enumerate(batch.sequences):
        depths = made.depths()[slot]
        assert depths.max() >= 3
        for node in range(1, int(made.num_nodes[slot])):
            path, above = list(sequence.tokens), int(made.parents[slot, node])
            later = []
            while above > 0:
                later.insert(0, int(made.tokens[slot, above]))
                above = int(made.parents[slot, above])
            best = np.argsort(-DRAFT.logits(np.array(path + later)), kind="stable")
            rank = made.children(slot, int(made.parents[slot, node])).index(node)
            assert made.tokens[slot, node] in best[:4]
            assert tree == "auto" or isinstance(tree, list) or made.tokens[slot, node] == best[rank]


def test_a_wider_tree_is_accepted_further_than_its_chain():
    tokens = {}
    for name, tree in (("chain", {"widths": [1, 1, 1]}), ("tree", {"widths": [2, 2, 1]}), ("auto", "auto")):
        done = run(make_proposer(tree), 1, [SamplingParams(max_new_tokens=36)] * len(PROMPTS))
        tokens[name] = sum(s.stats.num_tokens for s in done) / sum(sum(s.stats.outcomes.values()) for s in done)
    assert tokens["chain"] + 0.2 < tokens["tree"] <= tokens["auto"] + 0.2


@pytest.mark.parametrize("tree", TREES)
def test_the_draft_reads_little_again(tree):
    """After an accepted path at most its length is read at once, and expansions feed no more than the tree has."""
    proposer = make_proposer(tree)
    run(proposer, 1, [SamplingParams(max_new_tokens=36)] * len(PROMPTS))
    widths = [seen["tokens"][1] for seen in proposer.rows.engine.feeds_seen]
    assert max(widths[1:]) <= 60 and np.mean(widths) < 6


@pytest.mark.distribution
@pytest.mark.parametrize("tree", [*TREES, "chain"])
def test_every_token_of_mixed_batches_has_the_targets_distribution(tree):
    """Requests with other temperatures join and are cancelled; chains end where another draft does not pay."""
    target = MockEngine(TARGET, "target", 30, ROWS, headroom=NODES + 1)
    done = decode_mixed(target, make_proposer(tree, slots=30, costs=COSTS), 400, ROWS)
    assert mixed_p_value(done, TARGET, DRAFT) > LEAST
    drafted, accepted = sum(sequence.stats.num_draft_tokens for sequence in done), num_accepted(done)
    assert 800 < accepted < 0.9 * drafted


@pytest.mark.parametrize("fields", [{"drafts": "greedy"}, {}])
def test_drafted_trees_leave_sampled_text_as_it_is(fields):
    tree = "auto" if not fields else {"widths": [2, 2, 1]}
    params = [SamplingParams(max_new_tokens=30, temperature=0.8, top_p=0.9, seed=i) for i in range(len(PROMPTS))]
    texts = []
    for proposer, slots in ((make_proposer(tree, 3, **fields), 3), (make_proposer(tree, 1, COSTS, **fields), 1)):
        texts.append([sequence.tokens for sequence in run(proposer, slots, params)])
    from speccompile.speculators.none.config import NoneProposer

    assert texts[0] == texts[1] == [sequence.tokens for sequence in run(NoneProposer(), 1, params)]


def test_drawn_text_depends_on_the_seed_alone():
    heats = (0.9, 0.0, 1.2, 0.7, 0.0)
    params = [SamplingParams(max_new_tokens=30, temperature=t, top_k=5 * (i % 2), seed=i) for i, t in enumerate(heats)]
    for tree in TREES[1:]:
        texts = [
            [sequence.tokens for sequence in run(make_proposer(tree, slots), slots, params)] for slots in (1, 2, 5)
        ]
        assert texts[0] == texts[1] == texts[2]
        for i in (1, 4):
            assert texts[0][i][len(PROMPTS[i]) :] == TARGET.greedy(PROMPTS[i], 30)


def test_draws_of_every_batch_size_share_one_array():
    proposer = make_proposer(TREES[1], 3)
    run(proposer, 3, [SamplingParams(max_new_tokens=10 * i, temperature=0.9, seed=i) for i in range(1, 6)])
    assert proposer.drawn.probs.shape == (3, 1 + proposer.drawn.shape.num_drafts, VOCAB)


@pytest.mark.distribution
def test_siblings_that_are_drawn_with_one_number_are_noticed(monkeypatch):
    right = SequenceBatch.draft_uniforms
    monkeypatch.setattr(SequenceBatch, "draft_uniforms", lambda *args: np.repeat(right(*args)[:, :1], args[-1], axis=1))
    target = MockEngine(TARGET, "target", 30, ROWS, headroom=NODES + 1)
    done = decode_mixed(target, make_proposer({"widths": [3, 2]}, slots=30), 300, ROWS)
    assert mixed_p_value(done, TARGET, DRAFT) < LEAST


@pytest.mark.distribution
def test_the_targets_own_distribution_after_a_refusal_is_noticed(monkeypatch):
    monkeypatch.setattr(acceptance, "residual", lambda target_probs, draft_probs: target_probs)
    target = MockEngine(TARGET, "target", 30, ROWS, headroom=NODES + 1)
    done = decode_mixed(target, make_proposer("chain", slots=30, costs=COSTS), 300, ROWS)
    assert mixed_p_value(done, TARGET, DRAFT) < LEAST


def test_drawn_siblings_carry_the_distributions_they_were_drawn_from():
    proposer = make_proposer({"widths": [2, 1]}, slots=2)
    params = [SamplingParams(temperature=0.8, top_k=5, seed=3), SamplingParams()]
    batch = SequenceBatch([], 2)
    batch.sequences = [TokenSequence(i, [4, 5 + i], p, frozenset(), None) for i, p in enumerate(params)]
    batch.changed()
    for slot, sequence in enumerate(batch.sequences):
        sequence.plan(ROWS)
        proposer.start(slot, sequence)
    tree = proposer.propose(batch)
    tree.validate(VOCAB)
    dist = warp(DRAFT.logits(np.array([4, 5]))[None, None], [0.8], [5], [1.0])[0, 0]
    np.testing.assert_allclose(tree.draft_probs[0, 1], dist, rtol=1e-6)
    np.testing.assert_array_equal(tree.draft_probs[0, 2], tree.draft_probs[0, 1])
    for node in range(1, 5):  # a greedy slot: one-hot distributions of the candidates
        assert tree.draft_probs[1, node, tree.tokens[1, node]] == 1 and tree.draft_probs[1, node].sum() == 1


@pytest.mark.parametrize("tree", TREES[1:])
def test_siblings_have_one_distribution_that_can_give_them_and_equal_ones_one_set_of_children(tree):
    """In all steps: rows are written again."""
    asked = [(0.9, 1, 1.0), (0.0, 0, 1.0), (1.3, 2, 1.0), (1.0, 0, 0.5), (0.7, 0, 1.0)]
    params = [SamplingParams(max_new_tokens=20, temperature=t, top_k=k, top_p=p, seed=9) for t, k, p in asked]
    proposer, seen = make_proposer(tree, slots=3), []
    propose = proposer.propose

    def watched(batch):
        made = propose(batch)
        if made.draft_probs is None:
            return made
        for slot, sequence in enumerate(batch.sequences):
            num = int(made.num_nodes[slot])
            tokens, parents, dists = made.tokens[slot, :num], made.parents[slot, :num], made.draft_probs[slot, :num]
            np.testing.assert_allclose(dists[1:].sum(axis=1), 1, rtol=1e-5)
            for node in range(1, num):
                elder = [n for n in range(1, node) if parents[n] == parents[node]]
                assert dists[node, tokens[node]] > 0
                if not sequence.sampling.is_greedy:
                    np.testing.assert_array_equal(dists[elder], np.tile(dists[node], (len(elder), 1)))
                if is_late := tokens[node] in tokens[elder]:
                    assert node not in parents
                seen.append(is_late)
        return made

    proposer.propose = watched
    run(proposer, 3, params)
    assert len(seen) > 50 and any(seen) == (tree != TREES[3])


def test_trees_that_the_draft_cannot_make_are_refused():
    with pytest.raises(RecipeError, match=r"speculator\.drafts: got sampled with tree: auto; expected auto or greedy"):
        DraftModelConfig("d", tree="auto", drafts="sampled")
    with pytest.raises(RecipeError, match="got a draft built for 4 candidates a node; expected 5 candidates a node"):
        make_proposer({"widths": [5]})
    with pytest.raises(RecipeError, match=r"got 12 draft tokens; expected at most engine\.max_draft_nodes = 10"):
        make_proposer({"widths": [3, 3]})
    chains = MockEngine(DRAFT, "draft", 1, ROWS, headroom=NODES + 1, num_candidates=1)
    with pytest.raises(RecipeError, match="got a draft built for 1 candidates a node; expected 8 candidates a node"):
        DraftModelMethod().make_proposer(
            DraftModelConfig("d", tree="auto"), {"draft": chains}, MethodContext(1, ROWS, NODES)
        )


def test_the_draft_is_built_for_what_the_tree_needs():
    jobs = {
        "chain": VocabCandidateOptions(1, gives_probs=True),
        "auto": VocabCandidateOptions(8, gives_probs=False),
        ((0,), (1,)): VocabCandidateOptions(2, gives_probs=True),
    }
    for tree, candidates in jobs.items():
        assert DraftModelMethod().graph_jobs(DraftModelConfig("d", tree=tree))[0].options == DecoderOptions(
            candidates=candidates
        )
