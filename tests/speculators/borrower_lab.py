# SPDX-License-Identifier: Apache-2.0
"""What drafts on the target's caches must keep: the target's greedy text and its distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from speccompile.core.sampling import SamplingParams
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from speccompile.runtime.verifier import Verifier
from tests.mock_lm import VOCAB, MockEngine, MockLM
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
        sequences = [
            TokenSequence(i, p, s, frozenset(), None) for i, (p, s) in enumerate(zip(prompts, params, strict=True))
        ]
        for _ in decode(Verifier(target, MAX_SEQ, chunk), proposer, SequenceBatch(list(sequences), batch)):
            pass
        return sequences


def some_prompts(num, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, size=rng.integers(1, 14)).tolist() for _ in range(num)]


def check_greedy(lab: Lab, batch: int) -> int:
    """Greedy text is the target's own, to the end of the cache; returns accepted drafts."""
    prompts = [*some_prompts(9), [3]]
    params = [SamplingParams(max_new_tokens=n) for n in (30, 1, 2, 17, 25, 3, 200, 12, 200, 20)]
    sequences = lab.run(prompts, params, batch)
    for sequence, prompt, asked in zip(sequences, prompts, params, strict=True):
        num = min(asked.max_new_tokens, MAX_SEQ + 1 - len(prompt))
        assert sequence.tokens[len(prompt) :] == TARGET.greedy(prompt, num)
    return sum(sequence.stats.json_from_stats()["num_accepted"] for sequence in sequences)


def check_seeds(make: Callable[[], Lab]) -> None:
    """The same seed gives the same text in any batch, with any chunks."""
    prompts = some_prompts(6, seed=5)
    asked = [(1.0, 0, 1.0), (0.7, 5, 1.0), (0.0, 0, 1.0), (1.3, 0, 0.8), (1.0, 4, 0.9), (0.5, 0, 1.0)]
    params = [
        SamplingParams(max_new_tokens=25, temperature=t, top_k=k, top_p=p, seed=i) for i, (t, k, p) in enumerate(asked)
    ]
    texts = [[s.tokens for s in make().run(prompts, params, b, c)] for b, c in ((1, 3), (4, 5), (3, 128))]
    assert texts[0] == texts[1] == texts[2]


def check_dist(lab: Lab, num: int = 1500) -> None:
    """Two tokens after the first follow the target's distribution. p < 1e-4 occurs in one of ten thousand seeds."""
    prompt, heat, top_k = list(PROMPT), 0.9, 4
    params = [SamplingParams(max_new_tokens=3, temperature=heat, top_k=top_k, seed=s) for s in range(num)]
    sequences = lab.run([prompt] * num, params, 60)
    assert fit_p_value(sequences, TARGET, (heat, top_k, 1.0), num_tokens=2) > LEAST
    accepted = sum(sequence.stats.json_from_stats()["num_accepted"] for sequence in sequences)
    assert accepted > 0.1 * num
