# SPDX-License-Identifier: Apache-2.0
"""Reading a prompt gives the first new token: the one, in bits, of a step of its own, and one step less."""

import numpy as np
import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch
from tests.lab.decoding import finished, sequences_of
from tests.mock_lm import VOCAB
from tests.runtime.scheduler_lab import Bench, greedy, numbers
from tests.runtime.test_loop import TARGET, make_proposer, make_verifier, run, some_prompts

KINDS = [("none", {}), ("suffix", {}), ("draft_model", {"num_draft_tokens": 3, "drafts": "greedy"})]


def decoded(reads_last, prompts, params, kind="none", batch=3, chunk=5, **config):
    """Returns sequences and how often the target ran."""
    verifier = make_verifier(chunk=chunk)
    verifier.may_read_last = verifier.may_read_last and reads_last
    done = finished(verifier, make_proposer(kind, **config), prompts, params, batch, is_invariant=True)
    return done, verifier.engine.feeds_seen


@pytest.mark.parametrize(("kind", "config"), KINDS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 9},
        {"temperature": 1.1, "min_p": 0.05, "presence_penalty": 0.4, "logprobs": 2},
    ],
)
def test_the_first_token_is_that_of_a_step(kind, config, fields):
    prompts = some_prompts(9, seed=5)
    params = [SamplingParams(max_new_tokens=12, seed=seed, **fields) for seed in range(len(prompts))]
    (with_last, _), (without, _) = (decoded(reads, prompts, params, kind, **config) for reads in (True, False))
    for mine, theirs in zip(with_last, without, strict=True):
        assert mine.tokens == theirs.tokens
        assert [entry.json_from_logprobs() for entry in mine.logprobs] == [
            entry.json_from_logprobs() for entry in theirs.logprobs
        ]
        assert mine.stats.num_first_tokens == (mine.num_prompt > 1) and theirs.stats.num_first_tokens == 0
        assert mine.stats.num_tokens == theirs.stats.num_tokens == 12


@pytest.mark.parametrize("chunk", [1, 2, 5, 8])
def test_a_plain_text_takes_one_run_less(chunk):
    for num_prompt in range(1, 20):
        prompt, asked = (
            some_prompts(1, num_prompt, low=num_prompt, high=num_prompt + 1),
            [SamplingParams(max_new_tokens=4)],
        )
        runs = [len(decoded(reads, prompt, asked, batch=1, chunk=chunk)[1]) for reads in (False, True)]
        seen = [shape["tokens"][1] for shape in decoded(True, prompt, asked, batch=1, chunk=chunk)[1]]
        if chunk == 1:
            assert runs[0] == runs[1] == num_prompt - 1 + 4 and seen == [1] * runs[0]
            continue
        reading, steps = seen[: len(seen) - 4 + (num_prompt > 1)], seen[len(seen) - 4 + (num_prompt > 1) :]
        assert steps == [1] * len(steps) and sum(reading) == num_prompt * (num_prompt > 1)
        assert max(reading, default=0) <= chunk and min(reading[-1:], default=2) >= 2
        # Where the chunks are full the last tokens need one of their own.
        assert runs[1] == runs[0] - (num_prompt > 1 and (num_prompt - 1) % chunk > 0)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_text_may_end_with_its_first_token(batch):
    prompts = some_prompts(7, seed=8, low=2)
    lengths = [1, 1, 5, 1, 3, 1, 1]
    params = [SamplingParams(max_new_tokens=num) for num in lengths]
    texts, reasons, sequences = run(prompts, params, make_verifier(), make_proposer("suffix"), batch)
    assert texts == [TARGET.greedy(prompt, num) for prompt, num in zip(prompts, lengths, strict=True)]
    assert reasons == ["length"] * 7 and [s.stats.num_first_tokens for s in sequences] == [1] * 7
    stop = TARGET.greedy(prompts[0], 1)[0]
    texts, reasons, _ = run([prompts[0]], SamplingParams(9), make_verifier(), make_proposer("none"), 1, {stop})
    assert (texts, reasons) == ([[stop]], ["stop"])


def test_a_prompt_that_is_not_finite_ends_alone_and_its_slot_is_cleared():
    verifier = make_verifier(slots=1)
    verifier.engine.bad = VOCAB - 1
    prompts = [[1, 2, VOCAB - 1, 3], [4, 5, 6]]
    cleared = []
    verifier.engine.clear_slot = cleared.append
    waiting = sequences_of(prompts, SamplingParams(3))
    steps = [s for steps in decode(verifier, make_proposer("none"), SequenceBatch(waiting, 1)) for s in steps]
    assert (steps[0].output_index, steps[0].tokens, steps[0].finish_reason) == (0, [], "error")
    assert "not finite" in waiting[0].error and cleared == [0]
    assert [token for step in steps[1:] for token in step.tokens] == TARGET.greedy(prompts[1], 3)


def test_the_first_step_output_comes_when_the_prompt_has_been_read():
    bench = Bench(slots=2, max_seq=120)
    prompt = numbers(40)
    handle = bench.submit(prompt, sampling=SamplingParams(max_new_tokens=6), wants_trace=True)
    events = []
    while not events:  # chunks of the scheduler, and the step after the last one
        events = bench.scheduler.step()
    (first_handle, first), later = events[0], events[1:]
    assert first_handle is handle and first.tokens == greedy(prompt, 1) and first.num_draft_tokens == 0
    assert [token for _, output in later for token in output.tokens] == greedy(prompt, 6)[
        1 : 1 + len(later[0][1].tokens)
    ]
    assert (first.trace.tokens, first.trace.parents, first.trace.path) == ([prompt[-1]], [-1], [0])
    assert first.trace.next_token == first.tokens[0]
    counters = bench.scheduler.counters
    assert counters.num_prefill_tokens == 40 and counters.num_tokens == 1 + sum(len(o.tokens) for _, o in later)


def test_a_request_of_one_token_leaves_its_slot_to_the_next():
    bench = Bench(slots=1, max_seq=120)
    prompts = [numbers(20, seed) for seed in range(4)]
    handles = [bench.submit(prompt, sampling=SamplingParams(max_new_tokens=1)) for prompt in prompts]
    bench.finish()
    assert [bench.tokens(handle) for handle in handles] == [greedy(prompt, 1) for prompt in prompts]
    assert not bench.scheduler.allocator.active and bench.scheduler.counters.num_steps == 0
    assert len(bench.scheduler.allocator.kept) == 1  # the rows of the last prompt, its last token among them
    [(slot, tokens)] = bench.scheduler.allocator.kept.items()
    assert tokens == prompts[-1] and bench.scheduler.verifier.lengths[slot] == 20
    assert np.array_equal(bench.scheduler.verifier.engine.cache[slot, :20], prompts[-1])
