# SPDX-License-Identifier: Apache-2.0
"""Drafts from suffix trees: what followed the longest run of tokens that occurred before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from speccompile.core.acceptance import Verdict
from speccompile.core.jobs import MethodContext
from speccompile.core.protocols import Batch, Outputs, StepTimes, TokenSequence
from speccompile.core.tree import Ints, TokenTree
from speccompile.drafting.acceptance import AcceptanceEstimate, SharedPrior, emitted_tokens
from speccompile.drafting.budget import Budget
from speccompile.drafting.candidates import Candidates, tree_from_candidates
from speccompile.drafting.grammars import FORCED, drafts_within
from speccompile.speculators.suffix.tree import Cursor, SuffixTree

if TYPE_CHECKING:
    from speccompile.speculators.suffix.config import SuffixConfig

# Acceptance rate after a match of 1, 2, ... tokens that was always followed by the same, before any verdict.
FIRST_RATES = (0.3, 0.5, 0.7, 0.8, 0.85, 0.9)
TOKENS_PER_MATCH = 2  # where nothing was measured
SHARED_WEIGHT = 0.02  # of one verdict in the rates that new sequences begin with


@dataclass(slots=True, eq=False)
class SuffixState:
    """The `draft_state` of a sequence.

    Args:
        estimate: acceptance of drafts by the length of the match, which stands in for a rank.
        shared: end of its tokens in the tree of all requests; None: there is no such tree.
        num_shared: tokens that the tree of all requests has read, or leaves out: it reads outputs alone.
        num_read: tokens that the sequence's own tree has read.
    """

    tree: SuffixTree
    cursor: Cursor
    estimate: AcceptanceEstimate
    shared: Cursor | None
    num_shared: int
    num_read: int = 0


class SuffixProposer:
    """See `speccompile.core.proposer.Proposer`. Drafts are deterministic."""

    catches_up = looks_up = True
    caches = ()

    def __init__(self, config: SuffixConfig, context: MethodContext) -> None:
        self.config = config
        self.max_drafts = min(config.num_draft_tokens, context.max_draft_nodes)
        self.budget = Budget(self.max_drafts, self.max_drafts, 1, context.costs.get("target"))
        self.shared = SuffixTree(config.depth, config.shared_bytes) if config.shared_bytes else None
        self._prior = SharedPrior(self.max_drafts)
        self._log_odds = [0.0] * len(FIRST_RATES)  # that a sequence begins with, by match length
        self._drafts: list[Candidates] = []  # of the last step, by slot; a draft's rank says how long the match was
        self.foreseen: list[float] = []  # see `speccompile.drafting.acceptance.Foreseeing`
        self.offered: list[Candidates] = []  # see there

    def start(self, slot: int, sequence: TokenSequence) -> None:
        """Makes an empty tree; that of all requests gets the prompt's end, as outputs are found by what is before."""
        tree, shared = SuffixTree(self.config.depth, self.config.max_bytes), None
        if self.shared is not None:
            shared = self.shared.open()
            for token in sequence.tokens[1 - self.config.depth :]:
                self.shared.append(shared, token)
        estimate = AcceptanceEstimate(self._prior, 1.0, self._log_odds)
        sequence.draft_state = SuffixState(tree, tree.open(), estimate, shared, len(sequence.tokens))

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """Makes an empty tree; returns `num_rows`: their tokens are read with the next chunk."""
        self.start(slot, sequence)
        return num_rows

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        self._read(sequence.draft_state, sequence.tokens[: start + tokens.shape[1]])

    def _read(self, state: SuffixState, tokens: list[int]) -> None:
        append, cursor = state.tree.append, state.cursor
        for token in tokens[state.num_read :]:
            append(cursor, token)
        state.num_read = max(state.num_read, len(tokens))
        if state.shared is not None and self.shared is not None:
            for token in tokens[state.num_shared :]:
                self.shared.append(state.shared, token)
            state.num_shared = max(state.num_shared, len(tokens))

    def propose(self, batch: Batch) -> TokenTree:
        """Returns, for each slot, the most frequent continuations of the longest match."""
        self.budget.is_forced = batch.is_forced
        self._drafts = [self._find(sequence, sequence.tokens, sequence.max_drafts) for sequence in batch.sequences]
        pairs = zip(batch.sequences, self._drafts, strict=True)
        self.offered = offered = [
            found if sequence.grammar is None else self._with_forced(sequence, found) for sequence, found in pairs
        ]
        num = self.budget.size(offered)
        tree, chosen = tree_from_candidates(offered, num, [sequence.max_drafts for sequence in batch.sequences])
        rows = zip(offered, chosen, strict=True)
        self.foreseen = [sum([found.paths[c] for c in nodes[1:]]) for found, nodes in rows]
        return tree

    def _with_forced(self, sequence: TokenSequence, found: Candidates) -> Candidates:
        forced = list(sequence.grammar.forced()[: min(self.max_drafts, sequence.max_drafts)])
        if self.config.tree != "chain" or found.tokens[1 : 1 + len(forced)] == forced:
            return found
        chain = Candidates.from_root(sequence.tokens[-1])
        for depth, token in enumerate(forced):
            chain.add(depth, [token], [FORCED])
        return chain

    def _find(self, sequence: TokenSequence, text: list[int], most: int) -> Candidates:
        """Returns the drafts after `text`, the tokens of a sequence or the first ones of these.

        They are at most `most` on a path; the root alone where nothing matches.
        """
        state, config, found = sequence.draft_state, self.config, Candidates.from_root(text[-1])
        self._read(state, text)
        tree, cursor, size = state.tree, state.cursor, state.tree.match(state.cursor)
        if state.shared is not None and self.shared is not None and (length := self.shared.match(state.shared)) > size:
            tree, cursor, size = self.shared, state.shared, length
        depth = min(self.max_drafts, most)
        if config.tokens_per_match != "auto":
            depth = min(depth, int(size * config.tokens_per_match + 1e-6))
        elif not self.budget.weighs_time:
            depth = min(depth, size * TOKENS_PER_MATCH)
        if size < config.min_match or depth == 0:
            return found
        if config.tree == "chain":
            tokens, shares = tree.chain(cursor, text, depth, config.min_prob)
            parents = list(range(-1, len(tokens) - 1))
        else:
            tokens, parents, shares = tree.branches(cursor, text, self.max_drafts, depth, config.min_prob)
        chosen, starts = drafts_within(sequence.grammar, tokens, [parent + 1 for parent in parents])
        tokens, shares = [tokens[draft] for draft in chosen], [shares[draft] for draft in chosen]
        prob, rate, rank = state.estimate.prob, FIRST_RATES[min(size, len(FIRST_RATES)) - 1], size - 1
        for token, start, share in zip(tokens, starts, shares, strict=True):
            found.add(start, [token], [prob(rate * share, rank)], first_rank=rank)
        return found

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Learns which drafts were right, scored or not; emitted tokens are read before the next draft."""
        for slot, (sequence, found) in enumerate(zip(batch.sequences, self._drafts, strict=True)):
            if len(found.tokens) > 1:
                estimate = sequence.draft_state.estimate
                estimate.learn_ranks(found, *_judge(found, emitted_tokens(tree, verdict, slot)))
                rank = min(found.ranks[1], len(self._log_odds) - 1)
                self._log_odds[rank] += SHARED_WEIGHT * (estimate.log_odds[rank] - self._log_odds[rank])

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None: ...

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        self.budget.observe(num_slots, num_nodes, times)

    def flush(self) -> None: ...


def _judge(found: Candidates, emitted: list[int]) -> tuple[list[int], list[int]]:
    decided = [c for c, depth in enumerate(found.depths) if depth <= len(emitted)]
    path = [0]
    for at, candidate in enumerate(decided):
        depth = found.depths[candidate]
        is_next = depth == len(path) and found.parents[candidate] == decided[path[-1]]
        if depth and is_next and found.tokens[candidate] == emitted[depth - 1]:
            path.append(at)
    return decided, path
