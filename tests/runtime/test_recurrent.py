# SPDX-License-Identifier: Apache-2.0
"""Continuous batching on a target with recurrent states: they have the bits of a fresh prefill, texts are plain ones.

The target is a tiny real graph. Drafts are the target's own text with mistakes at random places.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from speccompile.backends.states import SlotStates
from speccompile.core.jobs import MethodContext
from speccompile.core.sampling_params import SamplingParams
from speccompile.core.tree import TokenTree
from speccompile.runtime.requests import Request
from speccompile.runtime.sequences import RequestHandle
from speccompile.runtime.service import make_scheduler, open_outputs
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.runtime.verifier import Verifier
from speccompile.speculators.none.config import NoneProposer
from tests.backends.hybrid_lab import MAX_SEQ, NUM_DRAFTS, VOCAB, Hybrid

pytestmark = pytest.mark.distribution

SLOTS, CHUNK = 4, 7
GREEDY = SamplingParams(max_new_tokens=14)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(tmp_path_factory.mktemp("hybrid"))


class Script(NoneProposer):
    """Drafts the text that plain decoding gives, with a wrong token here and there.

    Args:
        texts: tokens by prompt and sampling parameters.
        seed: of lengths and mistakes.
        num_again: rows of a prefix that it needs again, as a draft that reads the target's states.
    """

    def __init__(self, texts: dict[Any, list[int]], seed: int = 0, num_again: int = 0) -> None:
        self.texts, self.rng, self.num_again = texts, np.random.default_rng(seed), num_again
        self.num_accepted: list[int] = []
        self.resumed: list[tuple[int, int]] = []

    def resume(self, slot: int, sequence: Any, num_rows: int) -> int:
        self.resumed.append((slot, num_rows))
        return num_rows - self.num_again

    def propose(self, batch: Any) -> TokenTree:
        rows = []
        for sequence in batch.sequences:
            text = self.texts[tuple(sequence.tokens[: sequence.num_prompt]), sequence.sampling]
            done = len(sequence.tokens) - sequence.num_prompt
            num = int(self.rng.integers(0, min(sequence.max_drafts, NUM_DRAFTS) + 1))
            draft = text[done : done + num]
            if draft and self.rng.random() < 0.6:
                at = int(self.rng.integers(0, len(draft)))
                draft[at] = (draft[at] + 1) % VOCAB
            rows.append([sequence.tokens[-1], *draft])
        counts = np.array([len(row) for row in rows])
        tokens = np.zeros((len(rows), counts.max()), np.int64)
        for row, held in zip(tokens, rows, strict=True):
            row[: len(held)] = held
        return TokenTree.chain(tokens, counts)

    def commit(self, batch: Any, tree: TokenTree, verdict: Any, outputs: Any) -> None:
        drafts = tree.num_nodes - 1
        self.num_accepted += [a for a, num in zip(verdict.accepted, drafts.tolist(), strict=True) if num]


class Bench:
    """A scheduler on the tiny target, with the texts of plain decoding."""

    def __init__(
        self, hybrid: Hybrid, seed: int = 0, num_again: int = 0, keeps: bool = True, script: type[Script] = Script
    ) -> None:
        self.hybrid, self.texts, self.target = hybrid, {}, hybrid.open(SLOTS)
        self.script = script(self.texts, seed, num_again)
        self.engine = _spec_engine(self.target, self.script)
        self.plain = _spec_engine(hybrid.open(1), NoneProposer(), slots=1)
        self.scheduler = make_scheduler(self.engine, prefill_chunk=2 * CHUNK, keep_prefixes=keeps)
        self.handles: list[RequestHandle] = []
        self.requests: list[Request] = []  # of each handle
        self.outputs: list[list[int]] = []
        self.reasons: list[str | None] = []

    def submit(self, prompt: Sequence[int], params: SamplingParams = GREEDY, **fields: Any) -> RequestHandle:
        key = (tuple(prompt), params)
        if key not in self.texts:
            [plain] = self.plain.generate([list(prompt)], params, speculative=False)
            self.texts[key] = plain.tokens
        request = Request(list(prompt), params, **fields)
        handle = RequestHandle(len(self.handles), 0.0)
        open_outputs(handle, [request], self.engine, "auto")
        self.scheduler.add(handle)
        self.handles.append(handle)
        self.requests.append(request)
        self.outputs.append([])
        self.reasons.append(None)
        return handle

    def step(self) -> None:
        self.take(self.scheduler.step())
        self.check()

    def take(self, events: Any) -> None:
        for handle, output in events:
            self.outputs[handle.number] += output.tokens
            self.reasons[handle.number] = output.finish_reason

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()
        self.check_texts()

    def ask(self, prompt: Sequence[int], **fields: Any) -> int:
        """Decodes a prompt alone; returns how many of its tokens were not read again."""
        handle = self.submit(prompt, **fields)
        before = self.scheduler.counters.num_reused_tokens
        self.finish()
        assert self.reasons[handle.number] == "length"
        return self.scheduler.counters.num_reused_tokens - before

    def texts_by_slot(self) -> Iterator[tuple[int, list[int]]]:
        allocator, lengths = self.scheduler.allocator, self.engine.verifier.lengths
        active = [(slot, sequence.tokens) for slot, sequence in enumerate(allocator.active)]
        reading = [] if allocator.reading is None else [(allocator.reading_slot, allocator.reading.tokens)]
        for slot, tokens in (*active, *reading, *allocator.kept.items()):
            yield slot, tokens[: lengths[slot]]

    def check(self) -> None:
        for slot, tokens in self.texts_by_slot():
            self.hybrid.check(self.target, slot, tokens)

    def check_texts(self) -> None:
        for number, (request, tokens) in enumerate(zip(self.requests, self.outputs, strict=True)):
            wanted, reason = self.texts[tuple(request.prompt), request.sampling], self.reasons[number]
            assert tokens == (wanted if reason == "length" else wanted[: len(tokens)]), f"request {number}"


def _spec_engine(engine: Any, proposer: Any, slots: int = SLOTS) -> SpecEngine:
    context = MethodContext(slots, MAX_SEQ, NUM_DRAFTS)
    return SpecEngine(engine, {}, proposer, None, context, chunk=CHUNK)


def numbers(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, num).tolist()


def run_rounds(hybrid: Hybrid, seed: int, num_rounds: int, num_again: int = 0, script: type[Script] = Script) -> Bench:
    """Random requests of all kinds, some cancelled, with the states of every slot checked after every round."""
    bench, rng = Bench(hybrid, seed, num_again, script=script), np.random.default_rng(seed)
    kinds = (
        GREEDY,
        SamplingParams(max_new_tokens=9, repetition_penalty=1.4),
        SamplingParams(max_new_tokens=11, temperature=0.9, seed=5),
        SamplingParams(max_new_tokens=7, temperature=1.1, presence_penalty=0.8, seed=6),
    )
    for _ in range(num_rounds):
        if rng.random() < 0.5 and len(bench.scheduler.queue) < 3:
            bench.submit(
                _next_prompt(bench, rng),
                kinds[int(rng.integers(0, len(kinds)))],
                speculation=("auto", "auto", "on", "off")[int(rng.integers(0, 4))],
            )
        if rng.random() < 0.06 and (running := [h for h in bench.handles if h.open]):
            bench.take(bench.scheduler.cancel(running[int(rng.integers(0, len(running)))]))
        bench.step()
    bench.finish()
    return bench


def _next_prompt(bench: Bench, rng: np.random.Generator) -> list[int]:
    """A new prompt, one again, a conversation that goes on, or one that shares a part with an earlier one."""
    kind, fresh = rng.random(), rng.integers(0, VOCAB, int(rng.integers(1, 45))).tolist()
    if not bench.handles or kind < 0.35:
        return fresh
    at = int(rng.integers(max(len(bench.handles) - 6, 0), len(bench.handles)))
    prompt = list(bench.requests[at].prompt)
    if kind < 0.5:
        return prompt
    whole = [*prompt, *bench.outputs[at]]
    cut = len(whole) if kind < 0.75 else int(rng.integers(1, len(whole) + 1))
    return [*whole[:cut], *fresh[:12]][: MAX_SEQ - 20]


@pytest.mark.parametrize(("seed", "num_again"), [(0, 0), (1, 1)])
def test_200_rounds_keep_the_bits_of_a_fresh_prefill_and_the_texts_of_plain_decoding(hybrid, seed, num_again):
    bench = run_rounds(hybrid, seed, 200, num_again)
    accepted, counters = bench.script.num_accepted, bench.scheduler.counters
    assert set(accepted) == set(range(NUM_DRAFTS + 1)) and len(accepted) > 100
    assert counters.num_prefix_hits > 5 and counters.num_reused_tokens > 100
    assert set(bench.reasons) == {"length", "cancelled"} and len(bench.handles) > 40


def test_drafts_are_deterministic_for_generate_too(hybrid):
    bench = Bench(hybrid)
    prompts = [numbers(num, num) for num in (1, 2, 9, 30, 17, 5)]
    for prompt in prompts:
        bench.texts[tuple(prompt), GREEDY] = bench.plain.generate([prompt], GREEDY, speculative=False)[0].tokens
    results = bench.engine.generate(prompts, GREEDY)  # more than there are slots
    assert [r.tokens for r in results] == [bench.texts[tuple(p), GREEDY] for p in prompts]
    assert max(bench.script.num_accepted) == NUM_DRAFTS


def test_the_same_prompt_begins_from_its_snapshot(hybrid):
    bench, prompt = Bench(hybrid), numbers(40, 1)
    assert bench.ask(prompt) == 0
    assert bench.ask(prompt) == len(prompt) - 2  # the last two tokens are always read
    assert bench.ask(prompt + numbers(5, 2)) == len(prompt)  # the text that followed differs
    assert bench.ask(prompt[:30] + numbers(12, 3)) == 0  # within the prompt: a state cannot be cut


def test_a_conversation_goes_on_from_the_state_itself(hybrid):
    bench, prompt = Bench(hybrid), numbers(20, 4)
    bench.ask(prompt)
    whole = prompt + bench.outputs[-1]
    assert bench.ask(whole + numbers(6, 5)) == len(whole) - 1


def test_a_draft_that_needs_the_last_row_again_gets_it_from_a_pending_row(hybrid):
    bench, prompt = Bench(hybrid, num_again=1), numbers(40, 6)
    bench.ask(prompt)
    assert bench.ask(prompt) == len(prompt) - 3
    bench.ask(prompt, speculation="off")  # a plain step leaves nothing pending, so the snapshot is used
    whole = prompt + bench.outputs[-1]
    assert bench.ask(whole + numbers(4, 7)) == len(prompt) - 1
    assert bench.script.resumed[-1][1] == len(prompt)


def test_a_prompt_shares_what_a_slot_that_decodes_has_read(hybrid):
    bench, prompt = Bench(hybrid), numbers(33, 8)
    first = bench.submit(prompt)
    while len(bench.outputs[first.number]) < 8:
        bench.step()
    bench.submit([*prompt, (bench.texts[tuple(prompt), GREEDY][0] + 1) % VOCAB, 3])
    bench.finish()
    assert bench.scheduler.counters.num_reused_tokens == len(prompt)


def test_nothing_is_copied_where_no_prefix_is_kept(hybrid):
    bench = Bench(hybrid, keeps=False)
    assert bench.ask(numbers(40, 1)) == bench.ask(numbers(40, 1)) == 0
    assert bench.target.states.snapshots == [None] * SLOTS


def test_a_cancelled_prompt_is_no_other_prompts_state(hybrid):
    """Its slot has the snapshot of the sequence before, which must not be taken for its own."""
    bench, first, second = Bench(hybrid), numbers(40, 10), numbers(60, 11)
    bench.ask(first)
    bench.scheduler.allocator.kept.clear()
    handle = bench.submit(second)
    bench.step()
    bench.step()
    bench.take(bench.scheduler.cancel(handle))
    assert len(dict(bench.scheduler.allocator.kept.items())[0]) == 28
    bench.check()
    assert bench.ask(second[:28] + numbers(9, 12)) == 28


def check_last_rows(bench: Bench) -> None:
    """Texts that fill the cache are those of plain decoding to its last row."""
    full = SamplingParams(max_new_tokens=MAX_SEQ)
    for num in (MAX_SEQ - 9, MAX_SEQ - 4, 20):
        bench.submit(numbers(num, num), full, speculation="on")
    while bench.scheduler.has_work:
        bench.step()
    for request, tokens in zip(bench.requests, bench.outputs, strict=True):
        assert tokens == bench.texts[tuple(request.prompt), full]
    assert bench.reasons == ["cache_full"] * 3


def test_the_last_rows_of_the_cache_take_padded_chains(hybrid):
    check_last_rows(Bench(hybrid))


def test_a_chunk_leaves_the_rows_that_stay_pending_to_the_last_one(hybrid):
    for num in range(2, 20):
        engine = hybrid.open(1)
        verifier, tokens = Verifier(engine, MAX_SEQ, CHUNK), numbers(num, num)
        sizes = [nodes.shape[1] for nodes, _, _ in verifier.prefill(0, tokens)]
        assert sum(sizes) == num - 1 and max(sizes) <= CHUNK
        assert engine.states.num_pending[0] == min(num - 1, 2)
        hybrid.check(engine, 0, tokens[:-1])


def test_a_draft_that_is_not_finite_is_scored_again_without(tmp_path):
    """The rows of a slot whose draft is NaN are NaN; the second run has the same lengths, and no such draft."""
    bad = VOCAB - 1
    hybrid = Hybrid(tmp_path, bad=bad)
    bench, prompts = Bench(hybrid), [[t % bad for t in numbers(num, num)] for num in (9, 21, 14)]
    propose = bench.script.propose

    def spoilt(batch: Any) -> TokenTree:
        tree = propose(batch)
        tokens = tree.tokens.copy()
        tokens[0, 1:] = bad
        return replace(tree, tokens=tokens)

    bench.script.propose = spoilt  # type: ignore[method-assign]
    for prompt in prompts:
        bench.submit(prompt, speculation="on")
    bench.finish()
    assert bench.reasons == ["length"] * 3


def test_a_prompt_that_is_not_finite_ends_alone(tmp_path):
    bad = VOCAB - 1
    bench = Bench(Hybrid(tmp_path, bad=bad))
    prompts = [[t % bad for t in numbers(num, num)] for num in (9, 30)]
    for prompt in prompts:
        bench.submit(prompt)
    bench.texts[(*prompts[1][:20], bad), GREEDY] = []
    wrong = bench.submit([*prompts[1][:20], bad])  # the root is NaN: it fails in its first step
    while bench.scheduler.has_work:
        bench.take(bench.scheduler.step())
    assert bench.reasons == ["length", "length", "error"] and bench.outputs[wrong.number] == []
    bench.check_texts()
    bench.ask([t % bad for t in numbers(33, 4)])


def _wrong_begin(states: SlotStates, feeds: Any, first_slot: int) -> Any:
    step = BEGIN(states, feeds, first_slot)
    return step._replace(state_lengths=step.state_lengths + (np.asarray(feeds["lengths"]) > step.state_lengths))


def _wrong_resume(states: SlotStates, slot: int, rows: int) -> None:
    kept = [array.copy() for array in states.arrays.values()]
    RESUME(states, slot, rows)
    for array, before in zip(states.arrays.values(), kept, strict=True):
        array[...] = before


def _wrong_swap(states: SlotStates, first: int, second: int) -> None:
    arrays, states.arrays = states.arrays, {}
    SWAP(states, first, second)
    states.arrays = arrays


def _wrong_move(states: SlotStates, source: int, dest: int, rows: int | None = None) -> None:
    states.snapshots[dest] = states.snapshots[source]
    states.lengths[dest], states.num_pending[dest] = states.lengths[source], states.num_pending[source]


def _wrong_reset(states: SlotStates, slot: int, rows: int) -> None:
    if rows:
        RESUME(states, slot, rows)


BEGIN, RESUME, SWAP = SlotStates.begin, SlotStates.resume, SlotStates.swap
MUTANTS = {
    "a pending row is left out": ("begin", _wrong_begin),
    "a snapshot is not restored": ("resume", _wrong_resume),
    "slots are swapped without their states": ("swap", _wrong_swap),
    "slots move without their states": ("move", _wrong_move),
    "the snapshot before stays": ("resume", _wrong_reset),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(hybrid, name, monkeypatch):
    method, wrong = MUTANTS[name]
    monkeypatch.setattr(SlotStates, method, wrong)
    with pytest.raises(AssertionError, match=r"other bits|a snapshot of other tokens|hold other tokens|request"):
        run_rounds(hybrid, 0, 200)


def test_the_method_none_serves_a_folder_of_states(hybrid, tmp_path):
    engine = _spec_engine(Hybrid(tmp_path, "reference").open(2), NoneProposer(), slots=2)
    prompts = [numbers(9, 1), numbers(4, 2)]
    plain = _spec_engine(hybrid.open(2), NoneProposer(), slots=2)
    params = SamplingParams(max_new_tokens=5)
    assert [g.tokens for g in engine.generate(prompts, params)] == [g.tokens for g in plain.generate(prompts, params)]
