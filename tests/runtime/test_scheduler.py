# SPDX-License-Identifier: Apache-2.0
"""Requests join, leave, fail and go on in kept caches; no text and no slot is lost."""

import random
from collections import Counter

import numpy as np
import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.core.specs import SCORED_NODES
from speccompile.core.tree import TokenTree
from speccompile.errors import RuntimeFault
from speccompile.runtime.control import Controller, FixedLength
from speccompile.runtime.loop import FORCED_LENGTH
from tests.mock_lm import VOCAB
from tests.runtime.scheduler_lab import Bench, greedy, numbers
from tests.runtime.test_spec_engine import make_engine


def test_a_long_prompt_does_not_stall_those_that_decode():
    bench = Bench(max_seq=200, chunk=8)
    first = bench.submit([1, 2, 3], sampling=SamplingParams(max_new_tokens=100))
    bench.step()
    long = bench.submit(numbers(150), sampling=SamplingParams(max_new_tokens=4))
    for _ in range(9):
        before = len(bench.tokens(first))
        bench.step()
        assert len(bench.tokens(first)) > before and not bench.tokens(long)
        bench.check()
    bench.step()  # 149 tokens in chunks of 16
    assert bench.tokens(long)
    bench.finish()
    assert bench.tokens(first) == greedy([1, 2, 3], 100) and bench.tokens(long) == greedy(numbers(150), 4)


def test_short_prompts_join_together_up_to_a_chunk():
    bench = Bench(slots=3)
    handles = [bench.submit([i, i + 1, i + 2, i + 3]) for i in range(5)]
    bench.step()
    assert [len(bench.tokens(handle)) > 0 for handle in handles] == [True] * 3 + [False] * 2
    bench.finish()
    assert [bench.tokens(t) for t in handles] == [greedy([i, i + 1, i + 2, i + 3], 8) for i in range(5)]


def test_the_next_turn_of_a_chat_reads_only_what_is_new():
    bench = Bench(max_seq=120)
    turn = numbers(30)
    answer, stats = bench.ask(turn)
    assert stats["num_reused_tokens"] == 0
    bench.check()
    others = [bench.ask(numbers(20, seed))[0] for seed in (5, 6)]  # turns of other chats in between
    turn += [*answer, *numbers(10, seed=1)]
    answer, stats = bench.ask(turn)
    bench.check()
    assert answer == greedy(turn, 8) and stats["num_reused_tokens"] == 37  # the last token was not in the cache
    assert others == [greedy(numbers(20, seed), 8) for seed in (5, 6)]
    counters = bench.scheduler.json_from_scheduler()
    assert (counters["num_prefix_hits"], counters["num_prompts"], counters["num_reused_tokens"]) == (1, 4, 37)
    assert counters["num_prefill_tokens"] == 30 + 20 + 20 + (48 - 37)


def test_nothing_is_kept_where_that_is_not_wanted():
    bench = Bench(max_seq=120, keep=False)
    turn = numbers(30)
    answer, _ = bench.ask(turn)
    assert len(bench.scheduler.allocator.kept) == 0
    assert bench.ask(turn + answer)[1]["num_reused_tokens"] == 0


def test_the_same_prompt_again_reads_its_last_tokens_anew():
    bench = Bench(max_seq=120)
    prompt = numbers(40)
    first, _ = bench.ask(prompt)
    again, stats = bench.ask(prompt)
    assert first == again and stats["num_reused_tokens"] == 38


def test_outputs_of_one_request_share_its_prompt():
    bench = Bench(max_seq=120, slots=4)
    hot = SamplingParams(max_new_tokens=9, temperature=1.2, seed=7)
    prompt = numbers(50)
    handle = bench.submit(prompt, sampling=hot, num_outputs=4)
    bench.finish()
    texts = [bench.tokens(handle, i) for i in range(4)]
    for i, text in enumerate(texts):
        alone = SamplingParams(max_new_tokens=9, temperature=1.2, seed=7 + i)
        [wanted] = make_engine(max_seq=120).generate([prompt], alone, speculative=False)
        assert text == wanted.tokens
    assert len(set(map(tuple, texts))) > 1
    assert bench.scheduler.counters.num_prefill_tokens == 50 + 3 * 2


def test_a_system_prompt_is_copied_and_its_first_owner_keeps_its_own():
    bench = Bench(max_seq=120, slots=4)
    system = numbers(40)
    one, other = [*system, *numbers(30, 1)], [*system, *numbers(20, 2)]
    answer, _ = bench.ask(one)
    answer_2, stats = bench.ask(other)
    assert stats["num_reused_tokens"] == 40 and answer_2 == greedy(other, 8)
    bench.check()
    back, stats = bench.ask([*one, *answer, 5, 6])
    assert stats["num_reused_tokens"] == 77 and back == greedy([*one, *answer, 5, 6], 8)


def test_the_cache_that_was_unused_for_longest_goes_first():
    bench = Bench(max_seq=120, slots=2)
    chats = [numbers(30, seed) for seed in range(3)]
    for i in (0, 1, 0, 2):  # 2 replaces 1
        bench.ask(chats[i])
    assert bench.ask(chats[0])[1]["num_reused_tokens"] == 28
    bench.check()
    assert bench.ask(chats[1])[1]["num_reused_tokens"] == 0


def test_full_slots_keep_the_caches_of_ended_requests_for_the_next_turn():
    bench = Bench(max_seq=120, slots=3)
    chats = [numbers(20 + i, seed=i) for i in range(3)]
    for _ in range(4):
        handles = [bench.submit(c, sampling=SamplingParams(max_new_tokens=3 + i)) for i, c in enumerate(chats)]
        bench.finish()
        bench.check()
        for chat, handle in zip(chats, handles, strict=True):
            assert bench.tokens(handle) == greedy(chat, len(bench.tokens(handle)))
            chat += [*bench.tokens(handle), 3]
    assert bench.scheduler.counters.num_prefix_hits == 9


def test_a_cache_that_waiting_requests_will_overwrite_is_not_kept_for_long():
    bench = Bench(max_seq=120, slots=2)
    swaps, chats = [], [numbers(20 + i, seed=i) for i in range(6)]
    [cache] = bench.engine.proposer.caches
    swap = cache.swap
    cache.swap = lambda first, second: (swaps.append(first), swap(first, second))
    for i, chat in enumerate(chats):
        bench.submit(chat, sampling=SamplingParams(max_new_tokens=4 + i % 3))
    while len(bench.scheduler.queue) > 1:
        bench.step()
        bench.check()
    assert swaps == []
    bench.finish()
    assert len(bench.scheduler.allocator.kept) == 2


def test_a_forbidden_or_bounded_draft_gives_the_same_text():
    class Planner:
        limit, num_rests, seen, reads = 0, 0, [], []

        def plan(self, sequences):
            return self.limit

        def observe(self, sequences, steps, times):
            nodes = 1 + max(step.num_draft_tokens for step in steps)
            assert len(sequences) == len(steps) and times.propose_s + times.score_s <= times.step_s
            self.seen.append((nodes, [step.num_draft_tokens for step in steps]))

        def read(self, num_tokens, draft_s):
            self.reads.append((num_tokens, draft_s))

        def expects_drafts(self, num_active):
            return True

        def decisions(self):
            return {"limit": self.limit}

    planner = Planner()
    bench = Bench(planner)
    hot = SamplingParams(max_new_tokens=20, temperature=1.0, seed=3)
    texts = []
    for limit, speculation in ((0, "auto"), (2, "auto"), (None, "auto"), (None, "off"), (0, "on")):
        planner.limit, planner.seen = limit, []
        handle = bench.submit([1, 2, 3], sampling=hot, speculation=speculation)
        bench.finish()
        texts.append(bench.tokens(handle))
        drafted = {num for _, [num] in planner.seen}
        bound = {"auto": 9 if limit is None else limit, "on": FORCED_LENGTH, "off": 0}[speculation]
        assert max(drafted) <= bound and (max(drafted) > 0) == (bound > 0)
    assert all(text == texts[0] for text in texts)
    assert bench.scheduler.json_from_scheduler()["controller"] == {"limit": 0}
    assert [num for num, _ in planner.reads] == [2] * 5  # all of each prompt but its last token
    times_s = [draft_s for _, draft_s in planner.reads]
    assert times_s.pop(3) is None  # of the request without drafts
    assert all(draft_s > 0 for draft_s in times_s)


@pytest.mark.parametrize("limit", [0, 2, None])
def test_a_request_that_forces_drafts_gets_them_though_its_method_would_decline(limit):
    class Declining:
        """Drafts only in steps whose length was planned; left to itself it declines."""

        def __init__(self, proposer):
            self.proposer, self.catches_up, self.seen = proposer, False, []

        def propose(self, batch):
            self.seen.append([sequence.max_drafts for sequence in batch.sequences])
            roots = TokenTree.roots(np.array([sequence.tokens[-1] for sequence in batch.sequences]))
            return self.proposer.propose(batch) if batch.is_forced else roots

        def __getattr__(self, name):
            return getattr(self.proposer, name)

    class Planner(FixedLength):
        def plan(self, sequences):
            return limit

    params, drafted = SamplingParams(max_new_tokens=12), {}
    for speculation in ("auto", "on"):
        bench = Bench(Planner(), slots=2)
        bench.scheduler.proposer = declining = Declining(bench.scheduler.proposer)
        handles = [bench.submit([1, 2, 3], sampling=params, speculation=word) for word in (speculation, "auto")]
        bench.finish()
        assert bench.tokens(handles[0]) == bench.tokens(handles[1])
        ends = [bench.step_outputs[handle.number][0][-1].stats for handle in handles]
        drafted[speculation] = [end["num_draft_tokens"] for end in ends]
        most = {0: [FORCED_LENGTH, 0], 2: [2, 2], None: [FORCED_LENGTH] * 2}[limit]
        if speculation == "on":
            assert [max(column) for column in zip(*[s for s in declining.seen if len(s) == 2], strict=True)] == most
    assert drafted["on"][0] > 0 and (drafted["on"][1] > 0) == (limit != 0)
    assert (max(drafted["auto"]) > 0) == bool(limit)


@pytest.mark.parametrize("kind", ["chain", "tree", "heads"])
def test_a_server_draws_no_drafts(kind):
    """Offline they may be drawn; here the text is that of plain decoding with the same seed."""
    for seed in range(4):
        hot = SamplingParams(max_new_tokens=25, temperature=1.1, seed=seed)
        bench, plain = Bench(kind=kind), Bench(kind=kind)
        [alone] = plain.engine.generate([[1, 2, 3]], hot, speculative=False)
        tokens, stats = bench.ask([1, 2, 3], sampling=hot, speculation="on")
        assert tokens == alone.tokens and stats["num_draft_tokens"] > 0
        assert not bench.scheduler.batch.may_draw


def test_neighbours_and_their_coming_and_going_do_not_change_a_sampled_text():
    hot = SamplingParams(max_new_tokens=25, temperature=1.0, top_p=0.95, seed=11)
    [wanted] = make_engine().generate([[1, 2, 3]], hot, speculative=False)
    for seed in range(4):
        rng, bench = random.Random(seed), Bench(slots=4)
        handle = bench.submit([1, 2, 3], sampling=hot)
        while bench.scheduler.has_work:
            if rng.random() < 0.4:
                heat = rng.choice((0.0, 1.0))
                params = SamplingParams(max_new_tokens=rng.randint(1, 9), temperature=heat, seed=rng.randint(0, 99))
                if len(bench.handles) < 12:
                    bench.submit(numbers(rng.randint(1, 30), seed), sampling=params)
            bench.step()
        assert bench.tokens(handle) == wanted.tokens


def test_a_trace_shows_the_tree_and_what_was_kept_of_it():
    bench = Bench()
    handle = bench.submit([1, 2, 3], wants_trace=True)
    bench.finish()
    root = 3
    for step_output in bench.step_outputs[handle.number][0]:
        trace = step_output.trace
        assert trace.tokens[0] == root and trace.path[0] == 0 and trace.parents[0] == -1
        assert len(trace.tokens) == len(trace.texts) == step_output.num_draft_tokens + 1
        assert [*(trace.tokens[node] for node in trace.path[1:]), trace.next_token][
            : len(step_output.tokens)
        ] == step_output.tokens
        assert step_output.is_bonus == (0 < step_output.num_accepted == step_output.num_draft_tokens)
        root = step_output.tokens[-1]


def test_a_fault_while_a_prompt_is_read_ends_that_request_alone(monkeypatch):
    bench = Bench()
    one = bench.submit([1, 2, 3], sampling=SamplingParams(max_new_tokens=30))
    bench.step()
    real = bench.target.run

    def failing(feeds, first_slot=0):
        if first_slot == 1:
            raise RuntimeFault("engine target", "a fault", "none", "Try again.")
        return real(feeds, first_slot)

    monkeypatch.setattr(bench.target, "run", failing)
    two = bench.submit([4, 5, 6])
    bench.step()
    assert [p.finish_reason for p in bench.step_outputs[two.number][0]] == ["error"]
    assert "a fault" in bench.step_outputs[two.number][0][0].error
    monkeypatch.undo()
    three = bench.submit([7, 8, 9])
    bench.finish()
    assert bench.tokens(one) == greedy([1, 2, 3], 30) and bench.tokens(three) == greedy([7, 8, 9], 8)


@pytest.mark.parametrize("by", ["end", "cancel"])
def test_a_cache_that_cannot_be_moved_ends_decoding_requests_and_no_other(monkeypatch, by):
    bench = Bench(slots=3, max_seq=120)
    handles = [bench.submit(numbers(20, i), sampling=SamplingParams(max_new_tokens=30 + 20 * i)) for i in range(3)]
    while not bench.tokens(handles[2]):
        bench.step()

    def failing(*slots):
        raise RuntimeFault("engine target", "a copy that failed", "one that does not", "Try again.")

    monkeypatch.setattr(bench.target, "swap_slots", failing)
    if by == "cancel":
        bench.take(bench.scheduler.cancel(handles[0]))
    bench.finish()
    ends = [bench.step_outputs[t.number][0][-1].finish_reason for t in handles]
    assert ends == ["cancelled" if by == "cancel" else "length", "error", "error"]
    monkeypatch.undo()
    bench.check()
    assert bench.ask(numbers(20, 7))[0] == greedy(numbers(20, 7), 8)
    assert bench.scheduler.counters.num_engine_faults == 1


@pytest.mark.distribution
@pytest.mark.parametrize(("kind", "num_turns"), [("chain", 10_000), ("tree", 2_000), ("heads", 2_000)])
def test_random_joins_cancels_and_errors_leak_nothing(monkeypatch, kind, num_turns):
    rng, bench = random.Random(2), Bench(kind=kind, slots=5, max_seq=64)
    real, armed = bench.target.run, []

    def sometimes_failing(feeds, first_slot=0):
        if armed and (SCORED_NODES in feeds) == (armed[0] == "prompt"):  # one scored node: a part of a prompt
            raise RuntimeError(f"broken {armed.pop()}")
        return real(feeds, first_slot)

    def sometimes_unmovable(move):
        def moved(*slots):
            if armed == ["move"]:
                raise RuntimeError(f"broken {armed.pop()}")
            move(*slots)

        return moved

    monkeypatch.setattr(bench.target, "run", sometimes_failing)
    for name in ("move_slot", "swap_slots"):
        monkeypatch.setattr(bench.target, name, sometimes_unmovable(getattr(bench.target, name)))
    chats = [numbers(rng.randint(1, 20), seed) for seed in range(6)]
    for turn in range(num_turns):
        what = rng.random()
        bench.clock.now += 1.0
        if what < 0.3 and len(bench.scheduler.queue) < 8:
            chat = rng.randrange(len(chats))
            timeout = rng.choice((None, None, None, 3.0, 30.0))
            outputs = rng.choice((1, 1, 1, 2, 4))
            stops = tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 3))))
            params = SamplingParams(max_new_tokens=rng.randint(1, 6), stop_token_ids=stops)
            handle = bench.submit(chats[chat], sampling=params, timeout_s=timeout, num_outputs=outputs)
            chats[chat] = [*chats[chat], *greedy(chats[chat], 3), *numbers(rng.randint(0, 5), turn)]
            if len(chats[chat]) > 50:
                chats[chat] = numbers(rng.randint(1, 20), turn)
        elif what < 0.4 and bench.handles:
            bench.take(bench.scheduler.cancel(rng.choice(bench.handles[-12:])))
        elif what < 0.42:
            armed[:] = [rng.choice(("prompt", "step", "move"))]
            bench.step()
        else:
            bench.step()
        if turn % 10 == 0:
            bench.check()
    armed.clear()
    bench.finish()
    bench.check()
    reasons = Counter()
    for handle, request in zip(bench.handles, bench.requests, strict=True):
        for output in range(request.num_outputs):
            step_outputs, tokens = bench.step_outputs[handle.number][output], bench.tokens(handle, output)
            assert [p.finish_reason is None for p in step_outputs] == [True] * (len(step_outputs) - 1) + [False]
            assert tokens == greedy(request.prompt, len(tokens))
            reasons[step_outputs[-1].finish_reason] += 1
    scheduler = bench.scheduler
    assert reasons == scheduler.counters.finished
    assert set(reasons) == {"length", "stop", "cancelled", "timeout", "error"}
    assert min(reasons.values()) > num_turns // 500 and scheduler.counters.num_prefix_hits > num_turns // 50
    assert not (scheduler.queue or scheduler.allocator.active or scheduler.allocator.reading or scheduler.num_waiting)
    assert not scheduler._handles and len(scheduler._deadlines) < 60


def test_graphs_that_were_lost_are_reported():
    bench = Bench()
    assert bench.scheduler.json_from_scheduler()["graph_faults"] == {}
    bench.target.graph_fault = "a capture that failed"
    assert bench.scheduler.json_from_scheduler()["graph_faults"] == {"target": "a capture that failed"}


def test_every_sequence_of_512_gets_a_token_in_every_step():
    """However a budget divides drafts, no sequence starves: a step gives each one token at least."""
    bench = Bench(Controller(), slots=512, max_seq=32, chunk=1024)
    handles = [bench.submit([i % 20, i % 7, 3], sampling=SamplingParams(max_new_tokens=8 + i % 5)) for i in range(600)]
    num_steps = most = 0
    while bench.scheduler.has_work:
        active = [sequence.handle for sequence in bench.scheduler.allocator.active]
        before = [len(bench.tokens(handle)) for handle in active]
        bench.step()
        assert all(len(bench.tokens(handle)) > num for handle, num in zip(active, before, strict=True))
        num_steps, most = num_steps + 1, max(most, len(active))
    assert most == 512 and num_steps < 30
    for handle in handles[::50]:
        assert bench.tokens(handle) == greedy([handle.number % 20, handle.number % 7, 3], 8 + handle.number % 5)
