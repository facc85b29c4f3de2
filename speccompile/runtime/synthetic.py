# SPDX-License-Identifier: Apache-2.0
"""Synthetic acceptance, for benchmarks: draws decide how many drafts are kept, at stated rates, instead of the target.

Drafts, the target's steps and the caches are those of real decoding, so a schedule costs what it would cost with a
drafter whose drafts are kept so often. The texts are not the target's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.protocols import Engine, Outputs
from speccompile.core.sampling_params import SamplingParams
from speccompile.core.tree import TokenTree, Verdict
from speccompile.errors import BundleError, RuntimeFault
from speccompile.runtime.sequences import SequenceBatch
from speccompile.runtime.verifier import Verifier

KEY = "engine.synthetic_acceptance"
SEED = 0


def check_allowed(where: str, rates: Sequence[float], is_allowed: bool) -> None:
    """Refuses synthetic acceptance where nobody asked for it. Raises BundleError."""
    if rates and not is_allowed:
        allow = "serve --allow-synthetic-acceptance, load(..., allow_synthetic_acceptance=True)"
        todo = f"Build it without the key, or allow it: {allow}."
        raise BundleError(f"{where} ({KEY})", str(list(rates)), "drafts that the target verifies", todo)


def synthetic_note(rates: Sequence[float]) -> str:
    """Returns what an output says of its texts; empty: nothing is synthetic."""
    shown = ", ".join(f"{rate:g}" for rate in rates)
    return f"acceptance is synthetic ({KEY}: [{shown}]): these texts are not the target's" if rates else ""


class SyntheticVerifier(Verifier):
    """A verifier that keeps drafts along the path of first children, at each depth at its rate, deeper at the last."""

    def __init__(self, engine: Engine, max_seq_len: int, chunk: int, rates: Sequence[float]) -> None:
        super().__init__(engine, max_seq_len, chunk)
        self.rates = tuple(rates)
        self._random = random.Random(SEED)

    def may_draft(self, where: str, params: SamplingParams) -> bool:
        if params.structured_outputs is not None:
            got, expected = f"structured_outputs with {KEY}", "texts without a grammar"
            raise RuntimeFault(where, got, expected, "Leave one of them out.")
        return super().may_draft(where, params)

    def score(self, tree: TokenTree, batch: SequenceBatch) -> Verdict:
        if not (tree.is_chain or self._compacts):
            where, got = f"engine {self.engine.spec.name}", f"trees with {KEY}"
            expected = "chains: its steps compact the caches by their own verdict"
            raise RuntimeFault(where, got, expected, "Write speculator.tree: chain, or leave the key out.")
        return super().score(tree, batch)

    def _verdict(
        self, tree: TokenTree, batch: SequenceBatch, feeds: Mapping[str, NDArray[Any]], outputs: Outputs
    ) -> Verdict:
        real = super()._verdict(tree, batch, feeds, outputs)
        path = np.full(tree.tokens.shape, -1, dtype=np.int64)
        path[:, 0] = 0
        num_accepted = np.zeros(tree.batch, dtype=np.int64)
        for slot, following in enumerate(real.following):
            kept = [] if following < 0 else self._kept(tree, slot)
            path[slot, 1 : len(kept) + 1], num_accepted[slot] = kept, len(kept)
        return Verdict(path, num_accepted, real.next_token)

    def _kept(self, tree: TokenTree, slot: int) -> list[int]:
        kept = list[int]()
        for node, parent in enumerate(tree.parents[slot].tolist()):
            if node == 0 or parent != (kept[-1] if kept else 0):
                continue
            if self._random.random() >= self.rates[min(len(kept), len(self.rates) - 1)]:
                break
            kept.append(node)
        return kept
