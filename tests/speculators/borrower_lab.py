# SPDX-License-Identifier: Apache-2.0
"""What drafts on the target's caches must keep: the target's greedy text and its distribution."""

from collections.abc import Callable
from typing import Any

import numpy as np

from speccompile.core import registry, specs
from speccompile.core.jobs import MethodContext
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.verifier import Verifier
from tests.lab.decoding import check_texts, finished, num_accepted, random_prompts, warped
from tests.mock_lm import MockEngine, MockLM
from tests.speculators.distribution_check import LEAST, PROMPT, fit_p_value

MAX_SEQ = 64
TARGET = MockLM(seed=21, sharpness=1.2)
DRAFT = TARGET.blurred(seed=22, blur=0.5)


class Lab:
    """A mock target with a proposer.

    Args:
        make: (target engine, draft model, slots) -> proposer.
    """

    def __init__(self, make: Callable[[MockEngine, MockLM, int], Any]) -> None:
        self.make = make

    def run(self, prompts, params, batch, chunk=5):
        """Decodes; returns the finished sequences."""
        target = MockEngine(TARGET, "target", batch, MAX_SEQ, headroom=9)
        proposer = self.make(target, DRAFT, batch)
        return finished(Verifier(target, MAX_SEQ, chunk), proposer, prompts, params, batch)


class SharingDraft(MockEngine):
    """Writes to the target's own cache, where no row before the root's may be written."""

    def run(self, feeds, first_slot=0):
        for b, start in enumerate(feeds[specs.LENGTHS]):
            assert start >= self.verifier_lengths()[first_slot + b]
        return super().run(feeds, first_slot)


def sharing_lab(name: str, **config: Any) -> Lab:
    """Returns a lab of a method whose draft works on the target's own caches."""

    def make(target, draft, slots):
        method = registry.method(name)
        made = method.Config(**config)
        [job] = method.graph_jobs(made)
        engine = SharingDraft(draft, "draft", slots, MAX_SEQ, headroom=9)
        engine.cache = target.cache
        lengths = np.zeros(slots, dtype=np.int64)
        read = target.run

        def noted(feeds, first_slot=0):
            outputs = read(feeds, first_slot)
            rows = feeds[specs.LENGTHS] + feeds[specs.TOKENS].shape[1]
            if specs.SCORED_NODES not in feeds:  # a verdict
                rows = feeds[specs.LENGTHS] + outputs[specs.NUM_ACCEPTED] + 1
            lengths[first_slot : first_slot + len(rows)] = rows
            return outputs

        def moved(source, dest, rows=None):
            MockEngine.move_slot(target, source, dest, rows)
            lengths[dest], lengths[source] = lengths[source], 0

        target.run, target.move_slot, engine.verifier_lengths = noted, moved, lambda: lengths
        proposer = method.make_proposer(made, {job.name: engine}, MethodContext(slots, MAX_SEQ, 8))
        begin = proposer.start

        def started(slot, sequence):
            lengths[slot] = 0
            begin(slot, sequence)

        proposer.start = started
        return proposer

    return Lab(make)


class WatchedDraft(MockEngine):
    """Checks that no more rows are read than the target holds of each slot."""

    def run(self, feeds, first_slot=0):
        for b, told in enumerate(feeds[specs.TARGET_LENGTHS]):
            row = self.target.cache[first_slot + b]
            assert told <= len(row) and (row[:told] >= 0).all()
        # A slot that does not draft may stand further back: its last rows hold padding.
        assert (feeds[specs.TARGET_LENGTHS] <= feeds[specs.LENGTHS] + feeds[specs.TOKENS].shape[1]).any()
        return super().run({k: v for k, v in feeds.items() if k != specs.TARGET_LENGTHS}, first_slot)


def lab_of(name: str, **config: Any) -> Lab:
    """Returns a lab of a method that shares the target's caches, or of `glide`, which reads them."""
    if name != "glide":
        return sharing_lab(name, **config)

    def make(target, draft, slots):
        engine = WatchedDraft(draft, "draft", slots, MAX_SEQ, headroom=9)
        engine.target, method = target, registry.method(name)
        context = MethodContext(slots, MAX_SEQ, 8, config.pop("costs", {}))
        return method.make_proposer(method.Config("glide", **config), {"draft": engine}, context)

    return Lab(make)


def check_greedy(lab: Lab, batch: int) -> int:
    """Greedy text is the target's own, to the end of the cache; returns accepted drafts."""
    prompts = [*random_prompts(9), [3]]
    params = [SamplingParams(max_new_tokens=n) for n in (30, 1, 2, 17, 25, 3, 200, 12, 200, 20)]
    sequences = lab.run(prompts, params, batch)
    check_texts(TARGET, sequences, prompts, params, MAX_SEQ)
    return num_accepted(sequences)


def check_seeds(make: Callable[[], Lab]) -> None:
    """The same seed gives the same text in any batch, with any chunks."""
    prompts = random_prompts(6, seed=5)
    params = warped()
    texts = [[s.tokens for s in make().run(prompts, params, b, c)] for b, c in ((1, 3), (4, 5), (3, 128))]
    assert texts[0] == texts[1] == texts[2]


def check_dist(lab: Lab, num: int = 1500) -> None:
    """Two tokens after the first follow the target's distribution. p < 1e-4 occurs in one of ten thousand seeds."""
    prompt, heat, top_k = list(PROMPT), 0.9, 4
    params = [SamplingParams(max_new_tokens=3, temperature=heat, top_k=top_k, seed=s) for s in range(num)]
    sequences = lab.run([prompt] * num, params, 60)
    assert fit_p_value(sequences, TARGET, (heat, top_k, 1.0), num_tokens=2) > LEAST
    assert num_accepted(sequences) > 0.1 * num
