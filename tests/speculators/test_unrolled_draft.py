# SPDX-License-Identifier: Apache-2.0
"""A draft that drafts whole chains in one run gives the texts that a draft of single steps gives."""

from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.sampling import SamplingParams
from speccompile.core.specs import (
    CONFIDENCE,
    CONFIDENCES,
    LENGTHS,
    SAMPLED_LAWS,
    SAMPLED_PROBS,
    SAMPLED_TOKEN,
    SAMPLED_TOKENS,
    SCORED_NODES,
    TOKENS,
    UNIFORMS,
    GraphSpec,
    chain_outputs,
)
from speccompile.errors import RecipeError, RuntimeFault
from speccompile.runtime.loop import decode
from speccompile.runtime.slots import Slot, Slots
from speccompile.runtime.verifier import Verifier
from speccompile.speculators.draft_model.config import Config
from speccompile.speculators.draft_model.method import DraftModelMethod
from tests.mock_lm import VOCAB, MockEngine, MockLM

TARGET = MockLM(seed=11, sharpness=1.2)
DRAFT = TARGET.blurred(seed=12, blur=0.7)
NUM_STEPS, ROWS, SLOTS = 4, 96, 3
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8], [9, 7], [9, 3, 2, 3, 8, 4]]


class ChainEngine(MockEngine):
    """MockEngine with the contract of `unrolled_spec`."""

    def __init__(self, num_steps: int = NUM_STEPS) -> None:
        super().__init__(DRAFT, "draft", SLOTS, ROWS)
        self.num_steps, self.num_runs = num_steps, 0
        self.spec = GraphSpec("draft", (), chain_outputs(num_steps), ("k_cache.0",), VOCAB)

    def run(self, feeds, first_slot=0):
        self.num_runs += 1
        batch, nodes = feeds[TOKENS].shape
        lengths, scored = feeds[LENGTHS], feeds.get(SCORED_NODES, np.zeros((batch, 1), np.int64))
        rows = int(lengths.max()) + nodes + self.num_steps - 1
        if rows > self.max_rows:
            raise RuntimeFault("draft", f"{rows} rows", f"at most {self.max_rows}", "")
        draws = feeds.get(UNIFORMS, np.zeros((batch, self.num_steps), np.float32))
        assert draws.shape == (batch, self.num_steps)
        step, columns = {**feeds, SCORED_NODES: scored}, []
        for i in range(self.num_steps):
            out = super().run({**step, UNIFORMS: draws[:, i]}, first_slot)
            columns.append([out[n].copy() for n in (SAMPLED_TOKEN, CONFIDENCE, SAMPLED_PROBS)])
            step |= {TOKENS: columns[-1][0][:, None], LENGTHS: lengths + scored[:, 0] + i + 1}
            step[SCORED_NODES] = np.zeros((batch, 1), np.int64)
        tokens, confidences, laws = (np.stack(c, axis=1) for c in zip(*columns, strict=True))
        laws = np.concatenate((np.zeros_like(laws[:, :1]), laws), axis=1)
        self._outputs = {SAMPLED_TOKENS: tokens, CONFIDENCES: confidences, SAMPLED_LAWS: laws}
        return self._outputs


def make_proposer(engine, costs=None, **config):
    context = MethodContext(SLOTS, ROWS, 8, costs or {})
    return DraftModelMethod().make_proposer(Config("draft", **config), {"draft": engine}, context)


def texts(proposer, asked, max_seq_len=ROWS):
    """Tokens and the numbers of drafts of all prompts."""
    verifier = Verifier(MockEngine(TARGET, "target", SLOTS, ROWS, headroom=9), max_seq_len)
    waiting = [Slot(i, list(PROMPTS[i % len(PROMPTS)]), p, frozenset(), None) for i, p in enumerate(asked)]
    for _ in decode(verifier, proposer, Slots(waiting, SLOTS)):
        pass
    return [(slot.tokens, slot.stats.num_draft_tokens) for slot in waiting]


def test_the_engine_chooses_the_proposer():
    assert make_proposer(ChainEngine()).num_fed == NUM_STEPS - 1
    assert not hasattr(make_proposer(MockEngine(DRAFT, "draft", SLOTS, ROWS)), "num_fed")


@pytest.mark.parametrize("heats", [[0.0], [0.9], [0.0, 0.7, 1.2]], ids=["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("drafts", ["auto", "greedy"])
def test_texts_and_drafts_are_those_of_single_steps(heats, drafts):
    asked = [
        SamplingParams(max_new_tokens=20 + 3 * i, temperature=heats[i % len(heats)], top_k=6, seed=i) for i in range(7)
    ]
    config = {"num_draft_tokens": NUM_STEPS, "drafts": drafts}
    single = texts(make_proposer(MockEngine(DRAFT, "draft", SLOTS, ROWS), **config), asked)
    engine = ChainEngine()
    chain = texts(make_proposer(engine, engine_form="unrolled", **config), asked)
    assert chain == single
    assert sum(num for _, num in chain) > 80
    for (tokens, _), params, prompt in zip(chain, asked, [*PROMPTS, *PROMPTS], strict=False):
        if params.is_greedy:
            assert tokens == prompt + TARGET.greedy(prompt, params.max_new_tokens)


def test_one_run_drafts_a_chain():
    engine = ChainEngine()
    proposer = make_proposer(engine, num_draft_tokens=NUM_STEPS, engine_form="unrolled")
    slot = SimpleNamespace(tokens=[1, 2, 3], sampling=SamplingParams(), max_drafts=9)
    batch = SimpleNamespace(slots=[slot], may_draw=False, is_planned=False, warp_feeds=dict)
    proposer.start(0, slot)
    for num_accepted in (NUM_STEPS, 1, 0, 2):
        before = engine.num_runs
        tree = proposer.propose(batch)
        assert engine.num_runs == before + 1
        assert tree.tokens[0, 1:].tolist() == DRAFT.greedy(slot.tokens, NUM_STEPS)
        proposer.commit(batch, tree, SimpleNamespace(num_accepted=np.array([num_accepted])), {})
        # All rows are right but that of the last draft, which the graph has not read.
        assert proposer.lengths[0] == len(slot.tokens) + min(num_accepted, NUM_STEPS - 1)
        slot.tokens += [*tree.tokens[0, 1 : num_accepted + 1].tolist(), 7]


@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_rows_run_out_without_harm(heat):
    """Slots reach the end of the cache at different times; they are decoded plainly before a chain would not fit."""
    asked = [SamplingParams(max_new_tokens=200, temperature=heat, seed=i) for i in range(5)]
    chain = texts(make_proposer(ChainEngine(), num_draft_tokens=NUM_STEPS, engine_form="unrolled"), asked)
    for (tokens, num_drafts), prompt in zip(chain, PROMPTS, strict=True):
        assert len(tokens) in (ROWS, ROWS + 1) and num_drafts > 20
        if heat == 0:
            assert tokens == prompt + TARGET.greedy(prompt, len(tokens) - len(prompt))


def test_a_prompt_longer_than_the_rows_of_a_chain_allow():
    """The draft reads what it has room for and is not asked again."""
    engine = ChainEngine()
    proposer = make_proposer(engine, num_draft_tokens=NUM_STEPS, engine_form="unrolled")
    prompt = [int(t) for t in np.arange(ROWS - 2) % VOCAB]
    verifier = Verifier(MockEngine(TARGET, "target", SLOTS, ROWS, headroom=9), ROWS)
    slot = Slot(0, list(prompt), SamplingParams(max_new_tokens=50), frozenset(), None)
    for _ in decode(verifier, proposer, Slots([slot], SLOTS)):
        pass
    assert slot.tokens == prompt + TARGET.greedy(prompt, len(slot.tokens) - len(prompt))
    assert slot.stats.num_draft_tokens == 0 and len(slot.tokens) > len(prompt)


def test_weak_drafts_are_left_out_where_they_were_not_drawn():
    slot = SimpleNamespace(tokens=[1, 2, 3], sampling=SamplingParams(), max_drafts=9)
    batch = SimpleNamespace(slots=[slot], may_draw=False, is_planned=False, warp_feeds=dict)
    lengths = []
    for floor in (0.0, 0.3, 0.95):
        proposer = make_proposer(
            ChainEngine(), num_draft_tokens=NUM_STEPS, min_confidence=floor, confidence_odds=1.0, engine_form="unrolled"
        )
        proposer.start(0, slot)
        lengths.append(int(proposer.propose(batch).num_draft_tokens[0]))
    assert lengths[0] == NUM_STEPS and lengths[0] > lengths[1] >= lengths[2] == 0


def test_a_token_of_a_chain_costs_its_share_of_the_run():
    costs = {"target": StepCosts(((1, 5.0), (8, 6.0))), "draft": StepCosts(((1, 4.0),))}
    chain = make_proposer(ChainEngine(), costs, engine_form="unrolled")
    assert chain.policy.times(1).step_ms[0] - chain.policy.times(1).score_ms[0] == pytest.approx(1.0)
    single = make_proposer(MockEngine(DRAFT, "draft", SLOTS, ROWS), costs)
    assert single.policy.times(1).step_ms[0] - single.policy.times(1).score_ms[0] == pytest.approx(4.0)


def test_the_recipe_says_how_many_steps_are_unrolled():
    def options(**config):
        [job] = DraftModelMethod().graph_jobs(Config("draft", **config))
        return dict(job.options)

    assert options() == options(engine_form="stepwise") == {}
    assert options(engine_form="unrolled") == {"num_steps": 4}
    assert options(engine_form="unrolled", max_draft_tokens=3) == {"num_steps": 3}
    assert options(engine_form="unrolled", num_draft_tokens=7) == {"num_steps": 7}
    with pytest.raises(RecipeError, match=r"speculator\.engine_form: got 'rolled'; expected auto, stepwise, unrolled"):
        Config("draft", engine_form="rolled")
