# SPDX-License-Identifier: Apache-2.0
"""A scheduler on mock engines whose caches hold token ids: what a place keeps can be compared with the text."""

from collections import Counter

import numpy as np

from speccompile.core.jobs import MethodContext
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.requests import Request
from speccompile.runtime.scheduler import Scheduler
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.runtime.stats import TimedEngine
from speccompile.runtime.tickets import Ticket, open_outputs
from speccompile.speculators.draft_model.config import Config as DraftConfig
from speccompile.speculators.draft_model.method import DraftModelMethod
from speccompile.speculators.mlp.config import HEADS, MlpMethod
from speccompile.speculators.mlp.config import MlpConfig as MlpConfig
from tests.mock_lm import VOCAB, MockEngine
from tests.runtime.test_spec_engine import TARGET, Letters, make_engine
from tests.speculators.hidden_lm import MockHeads, MockTarget


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make_tree_engine(slots=3, max_seq=64, chunk=7):
    """Trees of a draft that keeps a cache."""
    context = MethodContext(slots, max_seq, 8)
    target = TimedEngine(MockEngine(TARGET, "target", slots, max_seq, headroom=9))
    draft = TimedEngine(MockEngine(TARGET.blurred(22, 0.7), "draft", slots, max_seq, headroom=9))
    config = DraftConfig("d", tree={"widths": [2, 1]})
    proposer = DraftModelMethod().make_proposer(config, {"draft": draft}, context)
    return SpecEngine(target, {"draft": draft}, proposer, Letters(), context, chunk=chunk)


def make_heads_engine(slots=3, max_seq=64, chunk=7):
    """Heads on the target's state, which must be that behind the root whenever they draft."""
    context = MethodContext(slots, max_seq, 8)
    target = MockTarget(TARGET, slots, max_seq, headroom=9)
    heads = MockHeads(TARGET.blurred(22, 0.5), target, 3, slots)
    timed = {HEADS: TimedEngine(heads)}
    proposer = MlpMethod().make_proposer(MlpConfig("heads"), timed, context)
    propose = proposer.propose

    def checked(batch):
        before, tree = heads.num_runs, propose(batch)
        if heads.num_runs > before:
            for place in proposer.states.known(batch.slots, range(len(batch.slots))):
                assert heads.read[place] == batch.slots[place].tokens
        return tree

    proposer.propose = checked
    return SpecEngine(TimedEngine(target), timed, proposer, Letters(), context, chunk=chunk)


ENGINES = {"chain": make_engine, "tree": make_tree_engine, "heads": make_heads_engine}


class Bench:
    """A scheduler with its engine, and what became of each request."""

    def __init__(self, planner=None, keep=True, chunk=7, kind="chain", **sizes):
        self.engine = ENGINES[kind](chunk=chunk, **sizes)
        self.target = self.engine.verifier.engine.engine
        for engine in self.engine.engines:
            engine.engine.voids_moved = False
        self.clock = Clock()
        self.scheduler = Scheduler(self.engine, planner, 2 * chunk, keep, self.clock)
        self.pieces, self.tickets = {}, []

    def submit(self, prompt, **fields):
        request = Request(prompt, **{"sampling": SamplingParams(max_new_tokens=8), **fields})
        ticket = Ticket(request, len(self.tickets), self.clock(), request.timeout_s, lambda piece: None)
        open_outputs(ticket, self.engine, "auto")
        self.scheduler.add(ticket)
        self.tickets.append(ticket)
        self.pieces[ticket.number] = [[] for _ in range(request.num_outputs)]
        return ticket

    def take(self, events):
        for ticket, piece in events:
            pieces = self.pieces[ticket.number][piece.output_index]
            assert not pieces or pieces[-1].finish_reason is None, "a piece behind the last"
            pieces.append(piece)

    def step(self):
        self.take(self.scheduler.step())

    def finish(self):
        while self.scheduler.has_work:
            self.step()

    def tokens(self, ticket, output=0):
        return [token for piece in self.pieces[ticket.number][output] for token in piece.tokens]

    def ask(self, prompt, **fields):
        ticket = self.submit(prompt, **fields)
        self.finish()
        return self.tokens(ticket), self.pieces[ticket.number][0][-1].stats

    def check(self):
        """Every output is at one place, and every place holds what is said of it."""
        scheduler, places = self.scheduler, self.scheduler.places
        lengths, cache = self.engine.verifier.lengths, self.target.cache
        assert [o.slot for o in places.active] == scheduler.slots.slots
        reading = [] if places.reading is None else [places.reading]
        seated = [*places.active, *reading, *scheduler.queue]
        open_ones = [o for ticket in self.tickets for o in ticket.open]
        assert Counter(map(id, seated)) == Counter(map(id, open_ones))
        taken = [*range(len(places.active)), *([places.reading_place] if reading else []), *dict(places.kept.items())]
        assert len(taken) == len(set(taken)) and all(0 <= place < places.max_places for place in taken)
        for place, output in enumerate(places.active):
            assert cache[place, : lengths[place]].tolist() == output.slot.tokens[:-1]
        for place, tokens in places.kept.items():
            assert lengths[place] == len(tokens) and cache[place, : lengths[place]].tolist() == tokens
        self.check_draft({p: o.slot.tokens for p, o in enumerate(places.active)} | dict(places.kept.items()))
        assert scheduler.num_waiting == sum(ticket.is_waiting for ticket in self.tickets)
        assert scheduler.has_work == bool(open_ones)

    def check_draft(self, texts):
        """The draft's own cache, where it has one, holds the same texts as far as it goes."""
        rows = getattr(self.engine.proposer, "rows", self.engine.proposer)
        if hasattr(rows, "lengths"):
            cache = rows.engine.engine.cache
            for place, tokens in texts.items():
                num = min(rows.lengths[place], len(tokens))  # rows behind a text that was cut are of no use
                assert cache[place, :num].tolist() == tokens[:num]


def greedy(prompt, num):
    return TARGET.greedy(list(prompt), num)


def numbers(num, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, num).tolist()
