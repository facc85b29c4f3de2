# SPDX-License-Identifier: Apache-2.0
"""Drafting with heads on the target's hidden state: whatever they draft, the text is the target's."""

import numpy as np
import pytest

from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.sampling import SamplingParams, warp
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from speccompile.runtime.verifier import Verifier
from speccompile.speculators.mlp.config import HEADS, MlpMethod
from speccompile.speculators.mlp.config import MlpConfig as Config
from tests.decode_one import decode_one
from tests.lab.decoding import check_texts, finished, num_accepted, random_prompts, sequences_of, warped
from tests.mock_lm import VOCAB, MockLM
from tests.speculators.distribution_check import LEAST, PROMPT, fit_p_value
from tests.speculators.hidden_lm import MockHeads, MockTarget, OnDevice

TARGET = MockLM(seed=21, sharpness=1.2)
DRAFT = TARGET.blurred(seed=22, blur=0.5)
MAX_SEQ = 96
NUM_HEADS = 3
CHEAP = {"target": StepCosts(((1, 10.0), (16, 11.0))), HEADS: StepCosts(((1, 0.1),))}
DEAR = {"target": StepCosts(((1, 1.0), (16, 30.0))), HEADS: StepCosts(((1, 2.0),))}
CONFIGS = [{}, {"num_draft_tokens": 2}, {"num_draft_tokens": 1}, {"min_confidence": 0.3}, {"drafts": "greedy"}]


def make(costs=None, slots=4, chunk=5, **config):
    """(verifier, proposer, heads)."""
    target = MockTarget(TARGET, slots, MAX_SEQ, headroom=9)
    heads = MockHeads(DRAFT, target, NUM_HEADS, slots)
    context = MethodContext(slots, MAX_SEQ, 8, costs or {})
    proposer = MlpMethod().make_proposer(Config("heads", **config), {HEADS: heads}, context)
    return Verifier(target, MAX_SEQ, chunk), proposer, heads


# Costs decide how much is drafted, the batch how slots move: all sizes where most is drafted.
@pytest.mark.parametrize(("costs", "batch"), [(CHEAP, 1), (CHEAP, 3), (CHEAP, 4), (None, 3), (DEAR, 3)])
@pytest.mark.parametrize("config", CONFIGS)
def test_greedy_text_is_the_targets_own(config, costs, batch):
    verifier, proposer, _ = make(costs, **config)
    prompts = random_prompts(7)
    params = [SamplingParams(max_new_tokens=n) for n in (30, 1, 2, 17, 25, 3, 200)]
    sequences = finished(verifier, proposer, prompts, params, batch)
    check_texts(TARGET, sequences, prompts, params, MAX_SEQ)
    if costs is CHEAP:
        assert num_accepted(sequences) > 50


@pytest.mark.parametrize("config", CONFIGS)
def test_same_seed_gives_same_text_in_any_batch(config):
    prompts = random_prompts(6, seed=5)
    params = warped()
    texts = []
    for batch, chunk in ((1, 3), (4, 5), (3, 128)):
        verifier, proposer, _ = make(CHEAP, chunk=chunk, **config)
        texts.append([sequence.tokens for sequence in finished(verifier, proposer, prompts, params, batch)])
    assert texts[0] == texts[1] == texts[2]
    oracle, proposer, _ = make(CHEAP, slots=1, **config)
    sequence = TokenSequence(0, prompts[1], params[1], frozenset(), None)
    for _ in decode_one(oracle, proposer, sequence):
        pass
    assert sequence.tokens == texts[0][1]


# Drafting pays where most drafts are accepted: some sequences draft, others do not.
TIGHT = {"target": StepCosts(((1, 10.0), (16, 25.0))), HEADS: StepCosts(((1, 12.0),))}


def test_a_sequence_that_draws_drafts_as_if_it_were_alone():
    """Its drafts change its text, so neither its neighbours nor what came before it decide whether it drafts."""
    prompts = random_prompts(8, seed=6)
    params = [SamplingParams(max_new_tokens=60, temperature=0.4 + 0.2 * i, seed=i) for i in range(8)]
    drafted = []
    for batch in (1, 4):
        verifier, proposer, _ = make(TIGHT, slots=4)
        done = finished(verifier, proposer, prompts, params, batch)
        drafted.append([(sequence.tokens, sequence.stats.num_draft_tokens) for sequence in done])
    alone = []
    for prompt, asked in zip(prompts, params, strict=True):
        verifier, proposer, _ = make(TIGHT, slots=1)
        (sequence,) = finished(verifier, proposer, [prompt], [asked], 1)
        alone.append((sequence.tokens, sequence.stats.num_draft_tokens))
    assert drafted[0] == drafted[1] == alone
    assert min(num for _, num in alone) < 10 and max(num for _, num in alone) > 50


@pytest.mark.distribution
# Seeds are fixed; p < 1e-4 happens by chance once in ten thousand choices of them.
@pytest.mark.parametrize(("config", "costs"), [({}, None), ({}, CHEAP), ({"drafts": "greedy"}, CHEAP)])
def test_three_sampled_tokens_follow_the_targets_distribution(config, costs):
    num, prompt, heat, top_k = 3000, list(PROMPT), 0.9, 4
    verifier, proposer, _ = make(costs, slots=20, **config)
    verifier.may_read_last = False  # so that the first token comes with drafts, too
    params = [SamplingParams(max_new_tokens=4, temperature=heat, top_k=top_k, seed=s) for s in range(num)]
    sequences = finished(verifier, proposer, [prompt] * num, params, 20)
    assert fit_p_value(sequences, TARGET, (heat, top_k, 1.0)) > LEAST
    drafts = sum(sequence.stats.num_draft_tokens for sequence in sequences)
    accepted = num_accepted(sequences)
    assert num < drafts and 0.2 * drafts < accepted < drafts


@pytest.mark.distribution
def test_the_distribution_test_notices_the_distributions_of_another_draft():
    """With the heads' distributions shifted by one token the text no longer follows the target."""
    from scipy.stats import chisquare

    num, prompt = 1500, [3, 1, 4]
    verifier, proposer, heads = make(None, slots=20)
    verifier.may_read_last = False
    right = heads.run

    def wrong(feeds, first_slot=0):
        outputs = right(feeds)
        return {**outputs, "chain_probs": np.roll(outputs["chain_probs"], 1, axis=2)}

    heads.run = wrong
    params = [SamplingParams(max_new_tokens=2, temperature=0.9, seed=s) for s in range(num)]
    sequences = finished(verifier, proposer, [prompt] * num, params, 20)
    dist = warp(TARGET.logits(np.array(prompt))[None], [0.9], [0], [1.0])[0].astype(np.float64)
    counts = np.bincount([sequence.tokens[3] for sequence in sequences], minlength=VOCAB)
    seen = dist * num >= 5
    assert chisquare(counts[seen], dist[seen] * num, sum_check=False).pvalue < 1e-4


def test_heads_continue_the_slots_own_text_and_states_stay_on_the_device():
    verifier, proposer, heads = make(None)
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11, 12]]
    params = [SamplingParams(max_new_tokens=30)] * 4
    waiting = SequenceBatch(sequences_of(prompts, params), 4)
    steps = decode(verifier, proposer, waiting)
    copies = []
    propose = proposer.propose

    def watched(batch):
        before = heads.num_runs
        tree = propose(batch)
        if heads.num_runs > before:
            for slot, sequence in enumerate(batch.sequences):
                if tree.num_nodes[slot] > 1:
                    assert heads.read[slot] == sequence.tokens
        copies.append(OnDevice.num_copies)
        return tree

    proposer.propose = watched
    next(steps)  # the first tokens, which came with the prompts
    for _ in range(6):
        next(steps)
    assert copies[1:] == copies[1:2] * 5  # prompts are copied, steps are not
    assert heads.num_runs == 6


def test_drawn_drafts_are_all_scored_and_padded_to_the_distributions_width():
    verifier, proposer, _ = make(CHEAP)
    batch = SequenceBatch(
        [TokenSequence(0, [1, 2, 3], SamplingParams(max_new_tokens=4, temperature=1.0), frozenset(), None)], 1
    )
    trees = []
    propose = proposer.propose
    proposer.propose = lambda batch: trees.append(propose(batch)) or trees[-1]
    for _ in decode(verifier, proposer, batch):
        pass
    assert trees[0].tokens.shape == (1, 1 + NUM_HEADS) and trees[0].draft_probs.shape[:2] == (1, 1 + NUM_HEADS)
    assert trees[0].num_nodes.tolist() == [3]  # two drafts fit before the end, the third is padding
