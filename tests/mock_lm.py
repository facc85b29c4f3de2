# SPDX-License-Identifier: Apache-2.0
"""A language model in numpy whose cache holds token ids: a wrong commit, rollback or move shows up as wrong tokens.

The next token's logits depend on the last two tokens (so that texts repeat and drafts can be right) and, by a
hash, on every visible token before (so that one wrong cache row changes them).
"""

from __future__ import annotations

import numpy as np

from speccompile.backends.base import finite_confidences
from speccompile.core.acceptance import accept
from speccompile.core.sampling import warp
from speccompile.core.specs import (
    CANDIDATE_PROBS,
    CANDIDATES,
    DRAFT_PROBS,
    LENGTHS,
    LOGITS,
    NEXT_TOKEN,
    NODE_PROBS,
    NUM_ACCEPTED,
    PARENTS,
    PATH,
    SCORED_NODES,
    TEMPERATURE,
    TOKENS,
    TOP_K,
    TOP_P,
    TREE_MASK,
    UNIFORMS,
    GraphSpec,
    TensorSpec,
)
from speccompile.core.tree import TokenTree, chain_mask, chain_parents
from speccompile.errors import RuntimeFault
from speccompile.graph_kinds.decoder import candidate_outputs
from speccompile.ops.candidates import top_tokens
from speccompile.ops.finite_token import finite_token

VOCAB = 24
POISON = -12345


class MockLM:
    """The function that target and draft engines compute."""

    def __init__(self, seed: int = 0, noise: float = 0.6, sharpness: float = 2.5, vocab: int = VOCAB) -> None:
        rng, self.vocab = np.random.default_rng(seed), vocab
        self.last = rng.normal(size=(vocab, vocab)) * sharpness
        self.before = rng.normal(size=(vocab, vocab))
        self.noise = rng.normal(size=(509, vocab)) * noise
        self.weights = rng.integers(1, 10**6, size=4096)

    def blurred(self, seed: int, blur: float) -> MockLM:
        """Returns a draft of it: the same function with noise of its own."""
        other = MockLM.__new__(MockLM)
        rng = np.random.default_rng(seed)
        other.last, other.before, other.weights = (
            self.last + blur * rng.normal(size=self.last.shape),
            self.before,
            self.weights,
        )
        other.noise, other.vocab = self.noise, self.vocab
        return other

    def logits(self, context: np.ndarray) -> np.ndarray:
        """Returns [vocab] float32, the logits after the tokens `context`."""
        row = self.last[context[-1]] + self.noise[int(context @ self.weights[: len(context)]) % 509]
        if len(context) > 1:
            row = row + self.before[context[-2]]
        return row.astype(np.float32)

    def logits_of_nodes(self, cache: np.ndarray, lengths: np.ndarray, tokens: np.ndarray, mask: np.ndarray):
        """Returns `logits` of many contexts at once: [batch, scored, vocab].

        Args:
            cache: [batch, rows]; a context begins with the first `lengths` [batch] rows.
            tokens: [batch, nodes].
            mask: [batch, scored, nodes], the tokens that follow them, of which there is one at least.
        """
        batch, longest = np.arange(len(tokens))[:, None], max(1, lengths.max())
        past = np.where(np.arange(longest) < lengths[:, None], cache[:, :longest], 0)
        rank = mask.cumsum(axis=-1)
        weights = self.weights[lengths[:, None, None] + np.maximum(rank, 1) - 1]
        hashes = (past @ self.weights[:longest])[:, None] + (mask * tokens[:, None] * weights).sum(axis=-1)
        num = rank[..., -1:]
        ends, earlier = ((rank == num - back).argmax(axis=-1) for back in (0, 1))  # the last two of the mask
        rows = self.last[tokens[batch, ends]] + self.noise[hashes % 509]
        before = np.where(num[..., 0] > 1, tokens[batch, earlier], past[batch, np.maximum(lengths - 1, 0)[:, None]])
        has_before = (num[..., 0] > 1) | (lengths > 0)[:, None]
        return np.where(has_before[..., None], rows + self.before[before], rows).astype(np.float32)

    def greedy(self, prompt: list[int], num: int) -> list[int]:
        """Returns the tokens that greedy decoding must give."""
        tokens = list(prompt)
        for _ in range(num):
            tokens.append(int(self.logits(np.array(tokens)).argmax()))
        return tokens[len(prompt) :]


class FakeEngine:
    """Attributes of engines that have neither views nor states. See `speccompile.core.protocols.Engine`."""

    compacts_in_step, view_rows, states = False, 0, None
    max_scored: int | None = None
    graph_fault: str | None = None
    seconds = 0.0


class MockEngine(FakeEngine):
    """Runs a `MockLM`; a step takes a microsecond by its clock."""

    def __init__(
        self, model: MockLM, role: str, max_slots: int, max_seq_len: int, headroom: int = 0, num_candidates: int = 4
    ) -> None:
        self.model, self.role, self.max_slots, self.max_seq_len = model, role, max_slots, max_seq_len
        self.max_rows = max_rows = max_seq_len + headroom
        outputs = candidate_outputs(num_candidates, dists=True) if role == "draft" else ()
        if role == "target":
            outputs = (TensorSpec(LOGITS, ("batch", "scored", model.vocab), "float32"),)
        num = num_candidates if role == "draft" else 0
        self.spec = GraphSpec(role, (), outputs, (), model.vocab, num_candidates=num, gives_probs=role != "target")
        self.voids_moved = True  # what moves is not read where it was; prompts that are shared are copied, though
        self.cache = np.full((max_slots, max_rows), -1, dtype=np.int64)
        self.feeds_seen: list[dict[str, tuple[int, ...]]] = []
        self.bad: int | None = None  # a token whose row is NaN: it spoils all rows of a slot, as masks do not hide NaN
        self._outputs: dict[str, np.ndarray] = {}

    def run(self, feeds, first_slot=0):
        for array in self._outputs.values():  # outputs are valid until the next run, not longer
            array[...] = POISON
        self.seconds += 1e-6
        self.feeds_seen.append({name: value.shape for name, value in feeds.items()})
        tokens, lengths = feeds[TOKENS], feeds[LENGTHS].copy()
        batch, nodes = tokens.shape
        if lengths.max() + nodes > self.max_rows or first_slot + batch > self.max_slots:
            raise RuntimeFault(self.role, f"{lengths.max() + nodes} rows", f"at most {self.max_rows}", "")
        mask = feeds[TREE_MASK] if TREE_MASK in feeds else chain_mask(batch, nodes)
        positions = lengths[:, None] + mask.sum(axis=-1) - 1
        assert positions.max() < self.max_seq_len, "a position that the model does not know"
        scored = feeds.get(SCORED_NODES)
        cache, each = self.cache[first_slot : first_slot + batch], np.arange(batch)[:, None]
        cache[each, lengths[:, None] + np.arange(nodes)] = tokens
        seen = mask if scored is None else mask[each, scored]
        past = cache[:, : lengths.max()]
        if (past < 0).any():
            assert not ((np.arange(past.shape[1]) < lengths[:, None]) & (past < 0)).any(), (
                "reads a cache row that was never written"
            )
        if (tokens < 0).any():
            assert (np.where(seen.any(axis=1), tokens, 0) >= 0).all(), "reads a token that is none"
        logits = self.model.logits_of_nodes(cache, lengths, tokens, seen)
        if self.bad is not None:
            logits[(cache == self.bad).any(axis=1)] = np.nan
        self._outputs = self._tail(feeds, tokens, logits, scored)
        return finite_confidences(self, self._outputs, first_slot)

    def _tail(self, feeds, tokens, logits, scored):
        batch, nodes = tokens.shape
        heat = feeds.get(TEMPERATURE, np.zeros(batch, dtype=np.float32))
        rules = heat, feeds.get(TOP_K, np.zeros(batch, dtype=np.int64)), feeds.get(TOP_P, np.ones(batch))
        if self.role == "draft":
            candidates, sure = top_tokens(logits, num_candidates=self.spec.num_candidates)
            dists = warp(logits, *rules) if heat.any() else np.zeros((*logits.shape[:2], 1), np.float32)
            return {CANDIDATES: candidates, CANDIDATE_PROBS: sure.copy(), NODE_PROBS: dists.copy()}
        parents = feeds.get(PARENTS, chain_parents(batch, nodes))
        if scored is not None and scored.shape[1] < nodes:
            tokens, parents = (np.take_along_axis(x, scored, axis=1) for x in (tokens, parents))
        tree = TokenTree(tokens, parents, np.full(batch, nodes), feeds.get(DRAFT_PROBS))
        draws = feeds.get(UNIFORMS, np.zeros((*tokens.shape, 2), dtype=np.float32))
        verdict = accept(tree, warp(logits, *rules), draws)
        (following,) = finite_token(logits, verdict.next_token)
        return {PATH: verdict.path, NUM_ACCEPTED: verdict.num_accepted, NEXT_TOKEN: following, LOGITS: logits}

    def reset(self, rows=1):
        self.cache[...] = -1

    def shrink(self, rows):
        self.cache[:, rows:] = -1

    def move_slot(self, source, dest, rows=None):
        self.cache[dest] = -1
        self.cache[dest, :rows] = self.cache[source, :rows]
        if self.voids_moved:
            self.cache[source] = -1

    def swap_slots(self, first, second, rows):
        kept = self.cache[[second, first], :rows]
        self.cache[[first, second]] = -1
        self.cache[[first, second], :rows] = kept

    def clear_slot(self, slot):
        self.cache[slot] = -1 if self.role == "target" else 0

    def compact(self, lengths, path):
        for b, length in enumerate(lengths):
            kept = path[b][path[b] >= 0]
            self.cache[b, length : length + len(kept)] = self.cache[b, length + kept]
