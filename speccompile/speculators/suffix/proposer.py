# SPDX-License-Identifier: Apache-2.0
"""Drafts from suffix trees: what followed the longest run of tokens that occurred before."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from speccompile.core.jobs import MethodContext
from speccompile.core.protocols import Batch, Outputs, StepTimes, TokenSequence
from speccompile.core.tree import Ints, TokenTree, Verdict
from speccompile.drafting.acceptance import AcceptanceEstimate, SharedPrior, emitted_tokens
from speccompile.drafting.budget import Budget
from speccompile.drafting.grammars import FORCED, drafts_within, has_grammars
from speccompile.drafting.tree import DraftTrees
from speccompile.speculators.suffix.tree import Cursor, SuffixTree

if TYPE_CHECKING:
    from speccompile.speculators.suffix.config import SuffixConfig

# Acceptance rate after a match of 1, 2, ... tokens that was always followed by the same, before any verdict.
FIRST_RATES = (0.3, 0.5, 0.7, 0.8, 0.85, 0.9)
TOKENS_PER_MATCH = 2  # where nothing was measured
SHARED_WEIGHT = 0.02  # of one verdict in the rates that new sequences begin with

Drafts = tuple[list[int], Sequence[int], list[float], int]  # tokens, parents, probabilities, and the rank of all


@dataclass(slots=True, eq=False)
class SuffixState:
    """The `draft_state` of a sequence."""

    tree: SuffixTree
    cursor: Cursor
    estimate: AcceptanceEstimate  # acceptance of drafts by the length of the match, which stands in for a rank
    num_shared: int  # tokens that the tree of all requests has read, or leaves out
    num_read: int = 0  # tokens that the sequence's own tree has read
    shared: Cursor | None = None  # end of its tokens in the tree of all requests, which reads them with the first draft


class SuffixProposer:
    """A `speccompile.core.proposer.Proposer`. Drafts are deterministic."""

    catches_up = looks_up = True
    may_draw = False
    caches = ()

    def __init__(self, config: SuffixConfig, context: MethodContext) -> None:
        self.config = config
        self.max_drafts = min(config.num_draft_tokens, context.max_draft_nodes)
        self.budget = Budget(self.max_drafts, self.max_drafts, 1, context.costs.get("target"))
        self.shared = SuffixTree(config.depth, config.shared_bytes) if config.shared_bytes else None
        self._prior = SharedPrior(self.max_drafts)
        self._log_odds = [0.0] * len(FIRST_RATES)  # that a sequence begins with, by match length
        self._drafts = DraftTrees([], 0)  # of the last step; a draft's rank says how long the match was
        self.foreseen: list[float] = []  # see `speccompile.drafting.acceptance.Foreseeing`
        self.offered = self._drafts  # see there

    def start(self, slot: int, sequence: TokenSequence) -> None:
        """Makes an empty tree; that of all requests reads the prompt's end, as outputs are found by what is before."""
        tree = SuffixTree(self.config.depth, self.config.max_bytes)
        estimate = AcceptanceEstimate(self._prior, 1.0, self._log_odds)
        left_out = max(len(sequence.tokens) + 1 - self.config.depth, 0)
        sequence.draft_state = SuffixState(tree, tree.open(), estimate, left_out)

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """Makes an empty tree once; returns `num_rows`: their tokens are read with the next chunk."""
        if sequence.draft_state is None:
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
        roots = [sequence.tokens[-1] for sequence in batch.sequences]
        self._drafts = self.offered = DraftTrees(roots, self.max_drafts)
        if self.config.tree == "chain" and has_grammars(batch):
            self.offered = DraftTrees(roots, self.max_drafts)
        for slot, sequence in enumerate(batch.sequences):
            found = self._find(sequence, sequence.tokens, sequence.max_drafts)
            self._drafts.put(slot, *found)
            if self.offered is not self._drafts:
                self.offered.put(slot, *self._with_forced(sequence, found))
        offered = self.offered
        if offered.num_nodes == 1:
            self.foreseen = [0.0] * len(roots)
            return TokenTree.roots(roots)
        tree, chosen = offered.best(self.budget.size(offered.gains(self.max_drafts), len(roots)))
        self.foreseen = [float(offered.paths[slot, nodes[1:]].sum()) for slot, nodes in enumerate(chosen)]
        return tree

    def _with_forced(self, sequence: TokenSequence, found: Drafts) -> Drafts:
        num = min(self.max_drafts, sequence.max_drafts)
        forced = list(sequence.grammar.forced()[:num]) if sequence.grammar is not None else []
        if found[0][: len(forced)] == forced:
            return found
        return forced, range(len(forced)), [FORCED] * len(forced), 0

    def _find(self, sequence: TokenSequence, text: list[int], most: int) -> Drafts:
        """Returns the drafts after `text`, tokens of a sequence from its first on: `most` on a path, or none."""
        state, config = sequence.draft_state, self.config
        if self.shared is not None and state.shared is None:
            state.shared = self.shared.open()
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
            return [], [], [], 0
        if config.tree == "chain":
            tokens, shares = tree.chain(cursor, text, depth, config.min_prob)
            parents = list(range(-1, len(tokens) - 1))
        else:
            tokens, parents, shares = tree.branches(cursor, text, self.max_drafts, depth, config.min_prob)
        chosen, starts = drafts_within(sequence.grammar, tokens, [parent + 1 for parent in parents])
        tokens, shares = [tokens[draft] for draft in chosen], [shares[draft] for draft in chosen]
        prob, rate, rank = state.estimate.prob, FIRST_RATES[min(size, len(FIRST_RATES)) - 1], size - 1
        return tokens, starts, [prob(rate * share, rank) for share in shares], rank

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Learns which drafts were right, scored or not; emitted tokens are read before the next draft."""
        found = self._drafts
        for slot, sequence in enumerate(batch.sequences):
            if num := found.count(slot):
                estimate, emitted = sequence.draft_state.estimate, emitted_tokens(tree, verdict, slot)
                estimate.learn_ranks(found, slot, *_judge(found, slot, num, emitted))
                rank = min(int(found.ranks[slot, 1]), len(self._log_odds) - 1)
                self._log_odds[rank] += SHARED_WEIGHT * (estimate.log_odds[rank] - self._log_odds[rank])

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None: ...

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        self.budget.observe(num_slots, num_nodes, times)

    def flush(self) -> None: ...


def _judge(found: DraftTrees, slot: int, num: int, emitted: list[int]) -> tuple[list[int], list[int]]:
    decided, path, depths = [0], [0], [0]
    rows = zip(found.tokens[slot].tolist()[1:], found.parents[slot].tolist()[1:], strict=True)
    for candidate, (token, parent) in enumerate(itertools.islice(rows, num), 1):
        depth = depths[parent] + 1
        depths.append(depth)
        if depth > len(emitted):
            continue
        if depth == len(path) and parent == decided[path[-1]] and token == emitted[depth - 1]:
            path.append(len(decided))
        decided.append(candidate)
    return decided, path
