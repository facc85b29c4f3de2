# SPDX-License-Identifier: Apache-2.0
"""Proposers whose drafts are wrong, absent, many or no tokens at all, independent of any method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Batch, Outputs
from speccompile.core.tree import Ints, TokenTree, Verdict
from speccompile.speculators.none.config import NoneProposer

Known = Mapping[tuple[int, ...], Sequence[int]]  # by prompt: the tokens that will follow


class PlantedDrafts(NoneProposer):
    """Base of drafts that need no engine: `drafts` gives those of one sequence."""

    def __init__(self, vocab_size: int, length: int, seed: int = 0) -> None:
        self.vocab_size, self.length, self.rng = vocab_size, length, np.random.default_rng(seed)

    def propose(self, batch: Batch) -> TokenTree:
        drafts = [self.drafts(sequence, min(sequence.max_drafts, self.length)) for sequence in batch.sequences]
        tokens = [[s.tokens[-1], *drafted] for s, (drafted, _) in zip(batch.sequences, drafts, strict=True)]
        return TokenTree.ragged(tokens, [[-1, *above] for _, above in drafts])

    def drafts(self, sequence: Any, most: int) -> tuple[list[int], list[int]]:
        """Returns the draft tokens of one sequence, and the parent of each."""
        raise NotImplementedError


class NoDrafts(PlantedDrafts):
    """Roots alone."""

    def drafts(self, sequence: Any, most: int) -> tuple[list[int], list[int]]:
        return [], []


class RandomTokens(PlantedDrafts):
    """Chains of random tokens."""

    def drafts(self, sequence: Any, most: int) -> tuple[list[int], list[int]]:
        return self.rng.integers(self.vocab_size, size=most).tolist(), list(range(most))


class NoTokens(PlantedDrafts):
    """Chains with ids that are no tokens: at the vocabulary's end, far beyond it, and negative."""

    def drafts(self, sequence: Any, most: int) -> tuple[list[int], list[int]]:
        wrong = (self.vocab_size, self.vocab_size + 7, 2**31 + 5, -1, -self.vocab_size - 3)
        chain = [wrong[i] for i in self.rng.integers(len(wrong), size=most)]
        if most and self.rng.random() < 0.5:
            chain[0] = int(self.rng.integers(self.vocab_size))
        return chain, list(range(most))


class KnownDrafts(PlantedDrafts):
    """Base of drafts around the tokens that will follow, so that some are accepted."""

    def __init__(self, known: Known, num_nodes: int, vocab_size: int, length: int, seed: int = 0) -> None:
        super().__init__(vocab_size, length, seed)
        self.known, self.num_nodes = known, num_nodes

    def following(self, sequence: Any, most: int) -> list[int]:
        """Returns the next tokens of a sequence, at most `most`; fewer at its end."""
        text = [*sequence.tokens[: sequence.num_prompt], *self.known[tuple(sequence.tokens[: sequence.num_prompt])]]
        return text[len(sequence.tokens) :][:most]

    def wrong(self, token: int) -> int:
        return int((token + 1 + self.rng.integers(self.vocab_size - 1)) % self.vocab_size)


class FullChains(KnownDrafts):
    """Chains as long as may be, right up to a random position, then wrong."""

    def drafts(self, sequence: Any, most: int) -> tuple[list[int], list[int]]:
        chain = self.following(sequence, min(most, self.num_nodes))
        if chain:
            at = int(self.rng.integers(len(chain) + 1))
            chain[at:] = [self.wrong(token) for token in chain[at:]]
        return chain, list(range(len(chain)))


class FullTrees(KnownDrafts):
    """Trees of as many nodes as may be: the right token is one of up to three siblings, in random order.

    Wrong siblings have children as well, so accepted paths leave gaps that compaction must close.
    """

    def drafts(self, sequence: Any, most: int) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        right = 0
        for depth, token in enumerate(self.following(sequence, most)):
            room = self.num_nodes - len(tokens)
            if room < 1:
                break
            width = min(room, 1 + int(self.rng.integers(3)))
            level = [token, *(self.wrong(token) for _ in range(width - 1))]
            level = [level[i] for i in self.rng.permutation(width)]
            first = 1 + len(tokens)
            tokens += level
            parents += [right] * width
            here = first + level.index(token)
            others = [node for node in range(first, first + width) if node != here]
            if others and depth + 1 < most and len(tokens) < self.num_nodes:
                tokens.append(int(self.rng.integers(self.vocab_size)))
                parents.append(others[0])
            right = here
        return tokens, parents


class SpoiltDrafts:
    """A `Proposer` that replaces every second draft of a method, which takes the verdict for its own drafts."""

    def __init__(self, inner: Proposer, vocab_size: int, seed: int = 0) -> None:
        self.inner, self.vocab_size, self.rng = inner, vocab_size, np.random.default_rng(seed)
        self.catches_up, self._drafted = inner.catches_up, TokenTree.roots([0])
        for name in ("start", "resume", "prefill", "skip", "observe", "flush"):
            setattr(self, name, getattr(inner, name))

    @property
    def caches(self) -> Any:
        return self.inner.caches

    def propose(self, batch: Batch) -> TokenTree:
        self._drafted = tree = self.inner.propose(batch)
        others = self.others(tree.tokens)
        others[:, 0] = tree.tokens[:, 0]
        return replace(tree, tokens=others, draft_probs=None)

    def others(self, tokens: Ints) -> Ints:
        """Returns what takes the place of the tokens [batch, nodes]."""
        is_other = self.rng.random(tokens.shape) < 0.5
        made: Ints = np.where(is_other, self.rng.integers(self.vocab_size, size=tokens.shape), tokens)
        return made

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        del tree
        self.inner.commit(batch, self._drafted, verdict, outputs)


class ShiftedDrafts(SpoiltDrafts):
    """The drafts of a method, of which each token has another id; siblings stay different. See `SpoiltDrafts`."""

    def __init__(self, inner: Proposer, vocab_size: int, shift: int) -> None:
        super().__init__(inner, vocab_size)
        self.shift = shift

    def others(self, tokens: Ints) -> Ints:
        made: Ints = (tokens + self.shift) % self.vocab_size
        return made
