# SPDX-License-Identifier: Apache-2.0
"""Prompts, the decode loop to its end over a verifier and a proposer, and engines that fail once."""

from types import SimpleNamespace

import numpy as np

from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from tests.mock_lm import VOCAB


def random_prompts(num, seed=0, low=1, high=14):
    """Returns prompts of `low` to `high` - 1 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, size=rng.integers(low, high)).tolist() for _ in range(num)]


def sequences_of(prompts, params, stop_ids=frozenset()):
    """Returns a sequence for each prompt; `params` is one for all, or one for each."""
    params = params if isinstance(params, list) else [params] * len(prompts)
    return [TokenSequence(i, list(p), s, stop_ids, None) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]


def warped(max_new_tokens=25):
    """Returns six ways to draw a token, greedy among them, with seeds of their own."""
    ways = [(1.0, 0, 1.0), (0.7, 5, 1.0), (0.0, 0, 1.0), (1.3, 0, 0.8), (1.0, 4, 0.9), (0.5, 0, 1.0)]
    seeds = (0, 1, 2, 3, 4, 2**63)
    return [SamplingParams(max_new_tokens, t, k, p, seed=s) for s, (t, k, p) in zip(seeds, ways, strict=True)]


def greedy_batch(*texts, max_drafts=9):
    """Returns a batch of greedy texts as a proposer sees it."""
    common = {"sampling": SamplingParams(), "max_drafts": max_drafts, "grammar": None}
    fields = {"may_draw": False, "is_greedy": True, "is_forced": False, "least_drafts": 0, "warp_feeds": dict}
    return SimpleNamespace(sequences=[SimpleNamespace(tokens=list(t), **common) for t in texts], **fields)


def finished(verifier, proposer, prompts, params, batch, **options):
    """Decodes all prompts, `batch` at a time; returns the sequences. `options` are those of `SequenceBatch`."""
    waiting = sequences_of(prompts, params)
    for _ in decode(verifier, proposer, SequenceBatch(waiting.copy(), batch, **options)):
        pass
    return waiting


def num_accepted(sequences):
    return sum(sequence.stats.json_from_stats()["num_accepted"] for sequence in sequences)


def check_texts(target, sequences, prompts, params, max_seq):
    """Each text is the target's own, to its length or to the end of the cache."""
    for sequence, prompt, asked in zip(sequences, prompts, params, strict=True):
        num = min(asked.max_new_tokens, max_seq + 1 - len(prompt))
        assert sequence.tokens[len(prompt) :] == target.greedy(prompt, num)


def fail_once(monkeypatch, target, call):
    """Lets the run number `call` of an engine raise; returns a list with an entry for each run."""
    real, calls = target.run, []

    def failing(feeds, first_slot=0):
        calls.append(1)
        if len(calls) == call:
            raise RuntimeFault("engine target", "a fault", "none", "Try again.")
        return real(feeds, first_slot)

    monkeypatch.setattr(target, "run", failing)
    return calls
