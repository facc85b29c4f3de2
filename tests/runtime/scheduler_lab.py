# SPDX-License-Identifier: Apache-2.0
"""A scheduler on mock engines whose caches hold token ids: what a slot keeps can be compared with the text."""

from collections import Counter

import numpy as np

from speccompile.core.jobs import MethodContext
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.requests import Request
from speccompile.runtime.sequences import RequestHandle
from speccompile.runtime.service import make_scheduler, open_outputs
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.speculators.mlp.config import HEADS, MlpMethod
from speccompile.speculators.mlp.config import MlpConfig as MlpConfig
from tests.lab.engines import Letters, mock_engine
from tests.mock_lm import VOCAB
from tests.runtime.test_spec_engine import TARGET, make_engine
from tests.speculators.hidden_lm import MockHeads, MockTarget


class Clock:
    """A clock that tests advance by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make_tree_engine(**sizes):
    """Trees of a draft that keeps a cache."""
    return mock_engine(TARGET, TARGET.blurred(22, 0.7), "draft_model", tree={"widths": [2, 1]}, **sizes)


def make_heads_engine(slots=3, max_seq=64, chunk=7, rates=()):
    """Heads on the target's state, which must be that before the root whenever they draft."""
    context = MethodContext(slots, max_seq, 8)
    target = MockTarget(TARGET, slots, max_seq, headroom=9)
    heads = MockHeads(TARGET.blurred(22, 0.5), target, 3, slots)
    proposer = MlpMethod().make_proposer(MlpConfig("heads"), {HEADS: heads}, context)
    propose = proposer.propose

    def checked(batch):
        before, tree = heads.num_runs, propose(batch)
        if heads.num_runs > before:
            for slot in proposer.states.known(batch.sequences, range(len(batch.sequences))):
                sequence = batch.sequences[slot]  # without a draft it has none, whatever the heads give for its slot
                assert heads.read[slot] == sequence.tokens or not (sequence.has_draft or tree.num_nodes[slot] > 1)
        return tree

    proposer.propose = checked
    return SpecEngine(target, {HEADS: heads}, proposer, Letters(), context, chunk=chunk, rates=rates)


ENGINES = {"chain": make_engine, "tree": make_tree_engine, "heads": make_heads_engine}


class Bench:
    """A scheduler with its engine, and what became of each request."""

    def __init__(self, planner=None, keep=True, chunk=7, kind="chain", **sizes):
        self.engine = ENGINES[kind](chunk=chunk, **sizes)
        self.target = self.engine.verifier.engine
        for engine in self.engine.engines:
            engine.voids_moved = False
        self.clock = Clock()
        self.scheduler = make_scheduler(self.engine, planner, 2 * chunk, keep, self.clock)
        self.step_outputs, self.handles, self.requests = {}, [], []

    def submit(self, prompt, **fields):
        request = Request(prompt, **{"sampling": SamplingParams(max_new_tokens=8), **fields})
        handle = RequestHandle(len(self.handles), self.clock(), request.timeout_s)
        open_outputs(handle, [request], self.engine, "auto")
        self.scheduler.add(handle)
        self.handles.append(handle)
        self.requests.append(request)
        self.step_outputs[handle.number] = [[] for _ in range(request.num_outputs)]
        return handle

    def take(self, events):
        for handle, step_output in events:
            step_outputs = self.step_outputs[handle.number][step_output.output_index]
            assert not step_outputs or step_outputs[-1].finish_reason is None, "a step output after the last"
            step_outputs.append(step_output)

    def step(self):
        self.take(self.scheduler.step())

    def finish(self):
        while self.scheduler.has_work:
            self.step()

    def tokens(self, handle, output=0):
        return [token for step_output in self.step_outputs[handle.number][output] for token in step_output.tokens]

    def ask(self, prompt, **fields):
        handle = self.submit(prompt, **fields)
        self.finish()
        return self.tokens(handle), self.step_outputs[handle.number][0][-1].stats

    def check(self):
        """Checks that every output has one slot, and that every slot holds the tokens that are recorded for it."""
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        lengths, cache = self.engine.verifier.lengths, self.target.cache
        assert allocator.active is scheduler.batch.sequences
        reading = [] if allocator.reading is None else [allocator.reading]
        held = [*allocator.active, *reading, *scheduler.queue]
        open_ones = [o for handle in self.handles for o in handle.open]
        assert Counter(map(id, held)) == Counter(map(id, open_ones))
        taken = [
            *range(len(allocator.active)),
            *([allocator.reading_slot] if reading else []),
            *dict(allocator.kept.items()),
        ]
        assert len(taken) == len(set(taken)) and all(0 <= slot < allocator.max_slots for slot in taken)
        for slot, sequence in enumerate(allocator.active):
            assert cache[slot, : lengths[slot]].tolist() == sequence.tokens[:-1]
        for slot, tokens in allocator.kept.items():
            assert lengths[slot] == len(tokens) and cache[slot, : lengths[slot]].tolist() == tokens
        self.check_draft(
            {slot: sequence.tokens for slot, sequence in enumerate(allocator.active)} | dict(allocator.kept.items())
        )
        assert scheduler.num_waiting == sum(handle.is_waiting for handle in self.handles)
        assert scheduler.has_work == bool(open_ones)

    def check_draft(self, texts):
        """Checks that the draft's own cache, where it has one, holds the same texts as far as it goes."""
        rows = getattr(self.engine.proposer, "rows", self.engine.proposer)
        if hasattr(rows, "lengths"):
            cache = rows.engine.cache
            for slot, tokens in texts.items():
                num = min(rows.lengths[slot], len(tokens))  # rows after a text that was cut are not used
                assert cache[slot, :num].tolist() == tokens[:num]


def greedy(prompt, num):
    return TARGET.greedy(list(prompt), num)


def numbers(num, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, num).tolist()


def mixed_prompts():
    """Returns prompts of 5 to 33 tokens."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, 6, size=n).tolist() for n in (20, 5, 33, 18, 25, 9, 30)]


def check_moving(bench, prompts):
    """A request joins in each step, so that sequences move between slots; texts are the target's own."""
    handles = []
    for i, prompt in enumerate(prompts):
        handles.append(bench.submit(prompt, sampling=SamplingParams(max_new_tokens=4 + 3 * (i % 5))))
        bench.step()
        bench.check()
    bench.finish()
    for i, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        assert bench.tokens(handle) == TARGET.greedy(prompt, 4 + 3 * (i % 5))
