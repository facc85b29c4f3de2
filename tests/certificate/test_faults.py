# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from speccompile.certificate.decoding import decode_with, plain_proposer
from speccompile.certificate.faults import check_faults, may_draft_trees
from speccompile.certificate.planted_drafts import FullTrees, NoTokens
from speccompile.core.sampling_params import SamplingParams
from speccompile.core.tree import TokenTree
from speccompile.errors import RuntimeFault
from speccompile.runtime.sequences import SequenceBatch
from tests.certificate.certificate_lab import NODES, PROMPTS, StaleRow, StrictEngine, WrongFollower, make_engine
from tests.mock_lm import VOCAB


def test_faults_change_speed_alone():
    check = check_faults(make_engine(), PROMPTS, 36)
    assert check.status == "passed", check.facts
    runs = {(run["text"], run["fault"]): run for run in check.facts["runs"]}
    assert len(runs) == 12
    steps = {fault: run["num_steps"] for (text, fault), run in runs.items() if text == "greedy"}
    assert steps["no drafts"] == 35 * len(PROMPTS) > steps["full chains"] > len(PROMPTS)
    assert runs["greedy", "full trees"]["num_accepted"] > 20
    assert runs["sampled", "full trees"]["num_accepted"] > 20
    assert {run["num_equal"] for run in runs.values()} == {len(PROMPTS)}


@pytest.mark.parametrize("num_tokens", [2, 8])
def test_few_drafts_show_nothing(num_tokens):
    check = check_faults(make_engine(), PROMPTS, num_tokens)
    assert (
        check.status == "not run"
        and "too few drafts" in check.summary
        and not check.json_from_check()["has_enough_drafts"]
    )


@pytest.mark.parametrize("kind", [StaleRow, WrongFollower])
def test_a_planted_defect_fails(kind):
    check = check_faults(make_engine(kind), PROMPTS, 16)
    assert check.status == "failed"
    assert "full trees" in check.summary


def test_an_engine_that_fails_at_ids_that_are_no_tokens_is_noticed(monkeypatch):
    monkeypatch.setattr("speccompile.runtime.verifier.Verifier._without_tokens", lambda self, tree: [])
    check = check_faults(make_engine(), PROMPTS, 8)
    assert check.status == "failed" and "ids that are no tokens" in check.summary


def test_full_trees_have_all_their_nodes_and_gaps():
    engine = make_engine()
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    wanted = decode_with(engine, plain_proposer(), PROMPTS, params).texts
    known = {tuple(prompt): text for prompt, text in zip(PROMPTS, wanted, strict=True)}
    proposer = FullTrees(known, NODES, VOCAB, NODES)
    sequences = [engine.make_sequence(i, prompt, params, False) for i, prompt in enumerate(PROMPTS[:3])]
    for sequence in sequences:
        sequence.plan(64)
    waiting = SequenceBatch([], 3)
    waiting.sequences = sequences
    trees = [proposer.propose(waiting) for _ in range(20)]
    for tree in trees:
        tree.validate(VOCAB)
    assert {int(tree.num_nodes.max()) for tree in trees} == {NODES + 1}
    assert any(not tree.is_chain for tree in trees)


def test_drafts_that_are_no_tokens_are_left_out_of_their_slots_alone():
    engine = make_engine()
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    batch = SequenceBatch([], 2)
    batch.sequences = [engine.make_sequence(i, prompt, params, False) for i, prompt in enumerate(PROMPTS[:2])]
    batch.changed()
    for slot, sequence in enumerate(batch.sequences):
        list(engine.verifier.prefill(slot, sequence.tokens))
    roots = [sequence.tokens[-1] for sequence in batch.sequences]
    tree = TokenTree.chain(np.array([[roots[0], 1, VOCAB], [roots[1], 2, 3]]))
    scored, verdict = engine.verifier.score_finite(tree, batch)
    assert scored.num_nodes.tolist() == [1, 3]
    assert verdict.following[0] >= 0
    with pytest.raises(RuntimeFault, match="out of bounds"):
        engine.verifier.score(tree, batch)


def test_failures_of_a_step_are_raised(monkeypatch):
    def fail(self, feeds, first_slot=0):
        raise RuntimeFault("engine target", "a broken step", "one that runs", "")

    engine = make_engine()
    slot = engine.make_sequence(0, PROMPTS[0], SamplingParams(max_new_tokens=6), False)
    batch = SequenceBatch([], 1)
    batch.sequences = [slot]
    batch.changed()
    monkeypatch.setattr(StrictEngine, "run", fail)
    with pytest.raises(RuntimeFault, match="a broken step"):
        engine.verifier.score_finite(TokenTree.chain(np.array([[1, 2]])), batch)


def test_ids_that_are_no_tokens_are_what_they_say():
    engine = make_engine()
    assert may_draft_trees(engine)
    sequence = engine.make_sequence(0, PROMPTS[0], SamplingParams(max_new_tokens=60), False)
    sequence.plan(64)
    drafts = [token for _ in range(50) for token in NoTokens(VOCAB, 4, seed=1).drafts(sequence, 4)[0]]
    assert min(drafts) < 0 and max(drafts) > 2**31
