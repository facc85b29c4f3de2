# SPDX-License-Identifier: Apache-2.0
from functools import partial

import numpy as np
import pytest

from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.sampling import SamplingParams
from speccompile.core.tree import TokenTree
from speccompile.runtime.control import FixedLength
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from speccompile.runtime.verifier import Verifier
from speccompile.speculators.none.config import NoneProposer
from tests.decode_one import decode_one
from tests.lab.decoding import random_prompts, sequences_of, warped
from tests.lab.engines import mock_proposer
from tests.mock_lm import VOCAB, MockEngine, MockLM

TARGET = MockLM(seed=1)
DRAFT = TARGET.blurred(seed=2, blur=0.8)
MAX_SEQ = 128
COSTS = {"target": StepCosts(((1, 2.0), (4, 3.0), (8, 4.5))), "draft": StepCosts(((1, 0.2),))}


class TreeProposer(NoneProposer):
    """Deterministic trees, random in form; some branches are right."""

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def propose(self, batch):
        nodes = 6
        tokens = self.rng.integers(0, VOCAB, size=(len(batch.sequences), nodes))
        parents = np.full((len(batch.sequences), nodes), -1)
        for b, sequence in enumerate(batch.sequences):
            tokens[b, 0] = sequence.tokens[-1]
            depths, paths = [0], [list(sequence.tokens)]
            for node in range(1, nodes):
                legal = [i for i, d in enumerate(depths) if d < sequence.max_drafts]
                if not legal:
                    break
                parent = int(self.rng.choice(legal))
                if self.rng.random() < 0.6:
                    tokens[b, node] = int(TARGET.logits(np.array(paths[parent])).argmax())
                parents[b, node] = parent
                depths.append(depths[parent] + 1)
                paths.append([*paths[parent], int(tokens[b, node])])
        return TokenTree.tree(tokens, parents)


def make_proposer(kind, slots=4, max_seq=MAX_SEQ, draft_seq=None, **config):
    draft = MockEngine(DRAFT, "draft", slots, draft_seq or max_seq)
    context = MethodContext(slots, max_seq, 8, COSTS, {"draft": draft_seq or max_seq})
    return TreeProposer() if kind == "tree" else mock_proposer(kind, draft, context, **config)


def make_verifier(slots=4, max_seq=MAX_SEQ, chunk=5):
    return Verifier(MockEngine(TARGET, "target", slots, max_seq, headroom=9), max_seq, chunk)


def run(prompts, params, verifier, proposer, batch=4, stop_ids=frozenset()):
    waiting = sequences_of(prompts, params, stop_ids)
    texts, reasons = [[] for _ in prompts], [None] * len(prompts)
    for steps in decode(verifier, proposer, SequenceBatch(waiting, batch)):
        for step in steps:
            texts[step.output_index] += step.tokens
            reasons[step.output_index] = step.finish_reason
    assert all(sequence.tokens == prompts[sequence.index] + texts[sequence.index] for sequence in waiting)
    return texts, reasons, waiting


some_prompts = partial(random_prompts, high=20)


KINDS = [
    ("none", {}),
    ("ngram", {}),
    ("ngram", {"num_draft_tokens": 3}),
    ("suffix", {}),
    ("suffix", {"tree": "auto", "shared_bytes": 10**6}),
    ("tree", {}),
    ("draft_model", {"num_draft_tokens": 3}),
    ("draft_model", {"num_draft_tokens": 1}),
    ("draft_model", {"num_draft_tokens": "auto"}),
    ("draft_model", {"num_draft_tokens": 5, "min_confidence": 0.3}),
    ("draft_model", {"num_draft_tokens": 4, "drafts": "greedy"}),
    ("draft_model", {"tree": {"widths": [2, 1]}}),
    ("hybrid", {}),
    ("hybrid", {"tree": "auto", "num_candidates": 4}),
]


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_greedy_text_is_the_targets_own(kind, config, batch):
    prompts = some_prompts(7)
    params = [SamplingParams(max_new_tokens=n) for n in (30, 1, 2, 17, 25, 3, 40)]
    texts, reasons, _ = run(prompts, params, make_verifier(), make_proposer(kind, **config), batch)
    assert texts == [TARGET.greedy(p, s.max_new_tokens) for p, s in zip(prompts, params, strict=True)]
    assert set(reasons) == {"length"}


@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_same_seed_gives_same_text_in_any_batch(kind, config):
    prompts = some_prompts(6, seed=5)
    params = warped()
    alone = [
        run([p], s, make_verifier(), make_proposer(kind, **config), 1)[0][0]
        for p, s in zip(prompts, params, strict=True)
    ]
    assert run(prompts, params, make_verifier(), make_proposer(kind, **config), 4)[0] == alone
    back = run(prompts[::-1], params[::-1], make_verifier(), make_proposer(kind, **config), 3)[0]
    assert back[::-1] == alone


@pytest.mark.parametrize(
    ("kind", "config"), [k for k in KINDS if k[0] in ("none", "ngram", "suffix", "draft_model", "hybrid")]
)
def test_batched_loop_equals_the_oracle(kind, config):
    for index, prompt in enumerate(some_prompts(3, seed=7)):
        params = SamplingParams(max_new_tokens=20, temperature=0.9, top_p=0.95, seed=index)
        batched = run([prompt], params, make_verifier(), make_proposer(kind, **config), 1)[0][0]
        steps = decode_one(
            make_verifier(), make_proposer(kind, **config), TokenSequence(0, prompt, params, frozenset(), None)
        )
        assert [token for step in steps for token in step] == batched


def test_drafts_are_accepted_and_counted():
    prompts = some_prompts(4)
    _, _, sequences = run(
        prompts, SamplingParams(max_new_tokens=40), make_verifier(), make_proposer("draft_model", num_draft_tokens=4)
    )
    for sequence in sequences:
        stats = sequence.stats.json_from_stats()
        assert stats["num_tokens"] == 1 + stats["num_steps"] + stats["num_accepted"] == 40
        assert stats["mean_acceptance_length"] == 1 + stats["num_accepted"] / stats["num_steps"] > 1.3
        assert len(stats["acceptance_by_position"]) == 4
        assert 0 < stats["num_accepted"] <= stats["num_draft_tokens"] <= 4 * stats["num_steps"]


@pytest.mark.parametrize("kind", ["none", "ngram", "suffix", "draft_model", "hybrid", "tree"])
def test_full_cache_stops_where_plain_decoding_stops(kind):
    prompts = some_prompts(3, low=20, high=33)
    texts, reasons, _ = run(
        prompts, SamplingParams(max_new_tokens=1000), make_verifier(max_seq=32), make_proposer(kind, max_seq=32)
    )
    assert reasons == ["cache_full"] * 3
    assert texts == [TARGET.greedy(p, 33 - len(p)) for p in prompts]


@pytest.mark.parametrize("drafts", ["greedy", "sampled"])
def test_a_draft_with_a_shorter_cache_falls_back_to_plain_decoding(drafts):
    prompts = some_prompts(5, low=10, high=40)
    proposer = make_proposer("draft_model", draft_seq=32, num_draft_tokens=3, drafts=drafts)
    texts, _, sequences = run(prompts, SamplingParams(max_new_tokens=50), make_verifier(), proposer)
    assert texts == [TARGET.greedy(p, 50) for p in prompts]
    assert any(sequence.stats.num_draft_tokens > 0 for sequence in sequences)


def test_stop_tokens_end_a_sequence_inside_a_draft():
    prompts = some_prompts(6)
    wanted = [TARGET.greedy(p, 40) for p in prompts]
    stop = wanted[0][9]
    cut = [w[: w.index(stop) + 1] if stop in w else w for w in wanted]
    for kind in ("none", "ngram", "suffix", "draft_model", "hybrid", "tree"):
        params = SamplingParams(max_new_tokens=40)
        texts, reasons, _ = run(prompts, params, make_verifier(), make_proposer(kind), 3, frozenset([stop]))
        assert texts == cut
        assert reasons == ["stop" if stop in w else "length" for w in wanted]


def test_a_greedy_chain_feeds_nothing_but_tokens_and_lengths():
    verifier = make_verifier()
    run(some_prompts(1, low=3), SamplingParams(max_new_tokens=20), verifier, make_proposer("draft_model"), 1)
    steps = [seen for seen in verifier.engine.feeds_seen if "scored_nodes" not in seen]
    assert steps and all(set(seen) == {"tokens", "lengths"} for seen in steps)


class Alternating(FixedLength):
    """Plain steps and steps with drafts in turn; notes what it saw."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def plan(self, sequences):
        return 0 if len(self.seen) % 2 else None

    def observe(self, sequences, steps, times):
        nodes = 1 + max(step.num_draft_tokens for step in steps)
        self.seen.append((len(sequences), nodes, times.step_s > 0))


def decode_with(planner, temperature):
    proposer = make_proposer("draft_model", num_draft_tokens=3)
    params = SamplingParams(max_new_tokens=20, temperature=temperature, seed=5)
    waiting = sequences_of(some_prompts(3), params)
    list(decode(make_verifier(), proposer, SequenceBatch(waiting, 4), planner=planner))
    return [sequence.tokens for sequence in waiting]


def test_no_planner_is_asked_where_text_depends_on_drafts():
    planner = Alternating()
    assert decode_with(planner, 0.8) == decode_with(None, 0.8)
    assert planner.seen == []
