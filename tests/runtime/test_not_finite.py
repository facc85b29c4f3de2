# SPDX-License-Identifier: Apache-2.0
"""Rows that are not finite end their own request, and nothing of them is read by another."""

import numpy as np
import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES, TOKENS
from speccompile.errors import RuntimeFault
from tests.lab.engines import Letters, mock_engine
from tests.runtime.scheduler_lab import Bench, greedy, make_tree_engine
from tests.runtime.test_service import Sink, serve  # noqa: F401
from tests.runtime.test_spec_engine import TARGET

SEED = 27
BAD = 15  # with SEED, none of the clean texts below has it
SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=12),
    "sampled": SamplingParams(max_new_tokens=12, temperature=0.7, seed=SEED),
    "on the host": SamplingParams(max_new_tokens=12, temperature=0.7, seed=SEED, min_p=0.05, logit_bias={3: 1.0}),
    "greedy on the host": SamplingParams(max_new_tokens=12, repetition_penalty=1.1),
}


KINDS = {
    "plain": ("none", {}),
    "ngram": ("ngram", {}),
    "chain": ("draft_model", {"num_draft_tokens": 4}),
    "tree": ("draft_model", {"tree": {"widths": [2, 1]}}),
}


def make_engine(kind, bad_target=True, bad_draft=False):
    name, config = KINDS[kind]
    engine = mock_engine(TARGET, TARGET.blurred(22, 0.7), name, **config)
    for one, is_bad in zip(engine.engines, (bad_target, bad_draft), strict=False):
        one.bad = BAD if is_bad else None
    return engine


CLEAN = [[0, 1, 2], [3, 0, 1, 5, 5, 5, 9, 9, 2], [4]]
SPOILT = [2, BAD, 1, 7]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_spoilt_prompt_ends_with_an_error_and_its_neighbours_do_not_notice(kind, name):
    params, engine = SAMPLINGS[name], make_engine(kind)
    wanted = [make_engine(kind).generate([clean], params)[0].tokens for clean in CLEAN]
    assert not any(BAD in tokens for tokens in wanted)
    for spoilt in (SPOILT, [2, 3, BAD], [BAD], [1] * 20 + [BAD] + [1] * 5):
        results = engine.generate([CLEAN[0], spoilt, CLEAN[1], CLEAN[2]], params)
        assert [results[i].tokens for i in (0, 2, 3)] == wanted
        assert [results[i].finish_reason for i in (0, 2, 3)] == ["length"] * 3 and results[0].error is None
        assert results[1].finish_reason == "error" and results[1].tokens == []
        assert "not finite" in results[1].error and "embeddings" in results[1].error
        assert "error" in results[1].json_from_generation() and "error" not in results[0].json_from_generation()
    assert [g.tokens for g in engine.generate(CLEAN, params)] == wanted


def test_a_stream_ends_with_an_error(kind):
    engine = make_engine(kind)
    stream = engine.stream(SPOILT, SAMPLINGS["greedy"])
    assert [step.finish_reason for step in stream] == ["error"]
    assert stream.generation.finish_reason == "error" and "not finite" in stream.generation.error
    assert engine.generate([CLEAN[0]], SAMPLINGS["greedy"])[0].tokens == greedy(CLEAN[0], 12)


def test_a_text_goes_as_far_as_without_drafts(kind):
    """A draft token whose row is NaN spoils the rows beside it: what the target writes must not depend on that."""
    bias = {BAD: 6.0}
    for seed in range(6):
        params = SamplingParams(max_new_tokens=30, temperature=1.2, seed=seed, logit_bias=bias)
        [plain] = make_engine("plain").generate([CLEAN[0]], params)
        [result] = make_engine(kind).generate([CLEAN[0]], params)
        if kind in ("plain", "ngram"):
            assert result.tokens == plain.tokens
        assert result.finish_reason == plain.finish_reason == "error"
        assert result.tokens[-1] == BAD and BAD not in result.tokens[:-1]


def test_drafts_that_spoil_the_targets_rows_do_not_end_the_request():
    """The draft proposes the token that the target never writes, at every step."""
    engine = make_engine("chain")
    draft = engine.engines[1]
    run = draft.run

    def proposes_bad(feeds, first_slot=0):
        outputs = dict(run(feeds, first_slot))
        outputs[CANDIDATES] = np.full_like(outputs[CANDIDATES], BAD)
        return outputs

    draft.run = proposes_bad
    for params in (SAMPLINGS["greedy"], SAMPLINGS["greedy on the host"]):
        plain = make_engine("plain", bad_target=False).generate(CLEAN, params)
        results = engine.generate(CLEAN, params)
        assert [g.tokens for g in results] == [g.tokens for g in plain]
        assert {g.finish_reason for g in results} == {"length"}
        assert results[0].stats["num_draft_tokens"] == 0 or results[0].stats["num_accepted"] == 0


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_draft_without_numbers_does_not_touch_the_text_nor_later_drafts(kind, name):
    params, fresh = SAMPLINGS[name], make_engine(kind, bad_target=False)
    engine = make_engine(kind, bad_target=False, bad_draft=True)
    spoilt = engine.generate([SPOILT] * 3, params)
    assert {g.finish_reason for g in spoilt} == {"length"}
    if params.is_greedy and not params.needs_logits:
        assert [g.tokens for g in spoilt] == [greedy(SPOILT, 12)] * 3
    assert np.isfinite(
        engine.engines[1].run({TOKENS: np.array([[1]]), "lengths": np.array([0])})[CANDIDATE_PROBS]
    ).all()
    if params.is_greedy:  # offline, draws depend on draft lengths, and these on the acceptance estimates
        results, wanted = engine.generate(CLEAN, params), fresh.generate(CLEAN, params)
        assert [g.tokens for g in results] == [g.tokens for g in wanted]


@pytest.mark.parametrize("kind", ["chain", "tree", "heads"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_scheduler_keeps_nothing_of_what_was_spoilt(kind, name):
    params = SAMPLINGS[name]
    prefix = [1, 2, 3, 4] * 5
    wanted = Bench(kind=kind).ask([*prefix, 5], sampling=params)[0]
    bench = Bench(kind=kind)
    bench.target.bad = BAD
    for spoilt in ([*prefix, BAD, 5], [*prefix, BAD], SPOILT, [*prefix[:18], BAD, 5, 6]):
        handle, beside = bench.submit(spoilt, sampling=params), bench.submit([*prefix, 5], sampling=params)
        bench.finish()
        last = bench.step_outputs[handle.number][0][-1]
        assert last.finish_reason == "error" and "not finite" in last.error
        assert bench.tokens(beside) == wanted
        assert not any(BAD in tokens for _, tokens in bench.scheduler.allocator.kept.items())
        assert not (bench.target.cache == BAD).any()
        bench.check()
    for _ in range(4):
        assert bench.ask([*prefix, 5], sampling=params)[0] == wanted
    assert bench.scheduler.counters.json_from_counters()["num_engine_faults"] == 0


def test_a_spoilt_prompt_that_is_cancelled_while_it_is_read_leaves_nothing():
    bench = Bench(chunk=4)
    bench.target.bad = BAD
    handle = bench.submit([1, 2, BAD, 4] * 10)
    bench.step()
    bench.take(bench.scheduler.cancel(handle))
    assert not (bench.target.cache == BAD).any()
    assert bench.ask([1, 2, 3])[0] == greedy([1, 2, 3], 8)


def test_a_fault_in_making_a_text_ends_that_request_alone():
    class Stumbling(Letters):
        def decode(self, ids, skip_special_tokens=True):
            if 7 in ids:
                raise KeyError("no such letter")
            return super().decode(ids)

    engine = make_tree_engine()
    engine.tokenizer = Stumbling()
    params = SamplingParams(max_new_tokens=6, stop=("@",), logit_bias={7: 100.0})
    clean = SamplingParams(max_new_tokens=6, stop=("@",), logit_bias={7: -100.0})
    broken, fine = engine.generate([[1, 2], [1, 2]], [params, clean])
    assert broken.finish_reason == "error" and "KeyError" in broken.error
    assert fine.finish_reason == "length" and len(fine.tokens) == 6


def test_the_first_token_is_not_lost_where_the_draft_fails_at_the_prompts_end(monkeypatch):
    bench = Bench()

    def failing(*chunk):
        raise RuntimeFault("engine draft", "a fault", "none", "Try again.")

    monkeypatch.setattr(bench.engine.proposer, "prefill", failing)
    tokens, stats = bench.ask([1, 2, 3])
    [[first, last]] = bench.step_outputs[0]
    assert tokens == greedy([1, 2, 3], 1) and stats["num_tokens"] == 1
    assert first.finish_reason is None and last.finish_reason == "error" and "a fault" in last.error
    monkeypatch.undo()
    assert bench.ask([1, 2, 3])[0] == greedy([1, 2, 3], 8) and bench.scheduler.counters.num_engine_faults == 1
    bench.check()
