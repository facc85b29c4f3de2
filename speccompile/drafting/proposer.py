# SPDX-License-Identifier: Apache-2.0
"""The proposer of every method whose draft is a decoder: a scorer, and the trees of its candidates.

Grown trees have the most probable candidates, or those that probably win the target's race, never drawn ones. They do
not change the text, so the sequences of a batch decide together, and candidates may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from speccompile.core.proposer import CacheRows
from speccompile.core.protocols import Batch, Outputs, StepTimes, TokenSequence
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES
from speccompile.core.tree import Ints, TokenTree, Verdict
from speccompile.drafting.acceptance import AcceptanceEstimate, DraftState, SharedPrior, acceptance_probs, own_path
from speccompile.drafting.budget import Budget, Outlook, Weighs
from speccompile.drafting.grammars import draft_warp, paths_after, refuse, restrict
from speccompile.drafting.race import raced_candidates
from speccompile.drafting.tree import DraftLayout, DraftTrees, Expansion, make_expansion


class Scorer(Protocol):
    """A draft that gives candidates after nodes, and owns the rows of its cache.

    `begin` and `expand` return `candidates` and `candidate_probs` [batch, scored, candidates], and `node_probs` where
    the draft gives distributions, valid until the next call; rows of slots that take no part are undefined. The other
    methods are called as those of `speccompile.core.proposer.Proposer`.
    """

    catches_up: bool

    @property
    def caches(self) -> Sequence[CacheRows]: ...

    def start(self, slot: int) -> None: ...

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """Returns how many of the first `num_rows` tokens need not be read again."""
        ...

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Handles a chunk that the target has read: `tokens` [1, nodes], from position `start` on."""
        ...

    def room(self, slot: int, sequence: TokenSequence) -> int:
        """Returns how many drafts on a path the cache has rows for after the root; below 0: it cannot draft at all."""
        ...

    def begin(self, batch: Batch, slots: Sequence[int], warp: Mapping[str, NDArray[Any]]) -> Outputs:
        """Reads the new tokens of these slots, the root last; returns candidates after the root: `scored` is 1."""
        ...

    def expand(self, batch: Batch, level: Expansion) -> Outputs: ...

    def commit(self, batch: Batch, num_kept: Sequence[int], verdict: Verdict, outputs: Outputs) -> None:
        """Handles the verdict. `num_kept`: by slot, accepted drafts whose rows are in the draft's cache.

        `batch` has the tokens before this step's verdict.
        """
        ...

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None:
        """Handles a step without drafts, for which neither `begin` nor `commit` was called."""
        ...

    def flush(self) -> None:
        """Copies what is still needed of the target's last outputs: they become invalid."""
        ...


class Drafts(Protocol):
    """Makes draft trees of a scorer's candidates: `TreeGrower`, `StaticTrees`."""

    may_draw: bool  # see `Proposer`

    def new_estimate(self) -> AcceptanceEstimate | None:
        """Returns the estimate of a new sequence; None where nothing is estimated."""
        ...

    def propose(self, batch: Batch) -> TokenTree: ...

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None: ...

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict) -> list[int]:
        """Updates the estimates; returns by slot how many accepted drafts have their rows in the draft's cache."""
        ...


@runtime_checkable
class LooksUp(Protocol):
    """A proposer that can find drafts in the text alone, without a graph."""

    looks_up: bool


def looks_up(proposer: object) -> bool:
    """Returns whether a proposer can find drafts in the text alone."""
    return isinstance(proposer, LooksUp) and proposer.looks_up


class DraftProposer:
    """A `Proposer` with the tree makers of batches without drawn drafts, and of those that may have some."""

    def __init__(self, rows: Scorer, likeliest: Drafts, drawn: Drafts) -> None:
        self.rows, self.likeliest, self.drawn = rows, likeliest, drawn
        self.caches, self.catches_up, self._used = rows.caches, rows.catches_up, likeliest
        self.may_draw = drawn.may_draw

    def start(self, slot: int, sequence: TokenSequence) -> None:
        self.rows.start(slot)
        sequence.draft_state = DraftState(self.likeliest.new_estimate())

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """Returns how many rows need not be read again; the estimate is new."""
        sequence.draft_state = DraftState(self.likeliest.new_estimate())
        return self.rows.resume(slot, sequence, num_rows)

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        self.rows.prefill(slot, sequence, tokens, start, outputs)

    def propose(self, batch: Batch) -> TokenTree:
        """Returns trees; a sequence that cannot or should not draft has its root alone."""
        self._used = self.drawn if batch.may_draw else self.likeliest
        tree = self._used.propose(batch)
        self.rows.flush()  # the target is about to run; without a draft, its last outputs were not read
        return tree

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        num_kept = self._used.commit(batch, tree, verdict)
        self.rows.commit(batch, num_kept, verdict, outputs)

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None:
        self.rows.skip(batch, verdict, outputs)

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        self.likeliest.observe(num_slots, num_nodes, times)

    def flush(self) -> None:
        self.rows.flush()

    @property
    def outlook(self) -> Outlook | None:
        return self.likeliest.outlook if isinstance(self.likeliest, Weighs) else None


class TreeGrower:
    """Grows draft trees for a batch; the estimates are in each sequence's `draft_state`.

    Args:
        log_odds: initial log(odds of acceptance / odds given by the confidence) of a new sequence.
        num_candidates: candidates to keep for each expanded node; None: all that the draft gives.
        races_probs: sequences that sample race over the draft's distributions, and grammars choose among all tokens.
    """

    may_draw = False

    def __init__(
        self,
        scorer: Scorer,
        budget: Budget,
        log_odds: float = 0.0,
        *,
        num_candidates: int | None = None,
        races_probs: bool = False,
    ) -> None:
        self.scorer, self.budget, self._log_odds = scorer, budget, log_odds
        self._num_candidates, self._races_probs = num_candidates, races_probs
        self._prior = SharedPrior(budget.max_depth)
        self._trees: DraftTrees | None = None  # of the last step; None where nothing was drafted
        self._chosen: list[list[int]] = []
        self._able: list[int] = []  # slots that drafted in the last step
        self._layout = DraftLayout(0, 1)

    @property
    def outlook(self) -> Outlook | None:
        return self.budget.outlook

    def new_estimate(self) -> AcceptanceEstimate:
        return AcceptanceEstimate(self._prior, self._log_odds)

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        self.budget.observe(num_slots, num_nodes, times)

    def propose(self, batch: Batch) -> TokenTree:
        """Returns trees; a sequence that cannot or should not draft has its root alone."""
        budget, self._trees, self._able = self.budget, None, []
        budget.is_forced, budget.least = batch.is_forced and budget.width == 1, batch.least_drafts
        roots, last_depths, accepted, is_masked = [], [], 0.0, False
        for slot, sequence in enumerate(batch.sequences):
            room = self.scorer.room(slot, sequence) if sequence.max_drafts > 0 else -1
            roots.append(sequence.tokens[-1])
            last_depths.append(min(room, sequence.max_drafts - 1))
            is_masked = is_masked or sequence.grammar is not None
            if room >= 0:
                self._able.append(slot)
                accepted += sequence.draft_state.estimate.accepted_length
        if not self._able or not budget.begins(accepted / len(roots), len(roots)):
            return TokenTree.roots(roots)
        self._trees = trees = DraftTrees(roots, budget.max_depth * budget.max_nodes)
        gains = self._grow(batch, trees, last_depths, is_masked)
        tree, self._chosen = trees.best(budget.size(gains, len(roots)))
        return tree

    def _grow(self, batch: Batch, trees: DraftTrees, last_depths: Sequence[int], is_masked: bool) -> list[float]:
        """Adds candidates level by level, as long as they are worth their time; returns their gains.

        Args:
            last_depths: by slot, the depth of the deepest node that may be expanded; below 0: it does not draft.
            is_masked: at least one sequence has a grammar.
        """
        budget, num_slots, most = self.budget, len(last_depths), self.budget.max_nodes
        self._layout, floor = DraftLayout(num_slots, most), budget.floor(num_slots)
        warp = draft_warp(batch) if self._races_probs and (is_masked or not batch.is_greedy) else {}
        outputs = self.scorer.begin(batch, self._able, warp)
        num = min(self._num_candidates or most, np.shape(outputs[CANDIDATES])[2])
        factors = np.array([sequence.draft_state.estimate.factors(num) for sequence in batch.sequences])
        scored, depth, width = np.array(last_depths)[:, None].clip(-1, 0), 1, 1
        while True:
            paths = paths_after(batch, trees, scored) if is_masked else ()
            outputs = restrict(batch, paths, outputs) if is_masked else outputs
            tokens, sure = np.asarray(outputs[CANDIDATES]), np.asarray(outputs[CANDIDATE_PROBS])
            if not batch.is_greedy:
                tokens, sure = raced_candidates(batch, depth, outputs)
            tokens, sure = tokens[:, :, :num], sure[:, :, :num]
            if is_masked:
                sure = refuse(batch, paths, tokens, sure)
            start = trees.add(scored, tokens, acceptance_probs(factors, sure), most, floor)
            ranked = trees.ranked(most)
            gains: list[float] = list(map(sum, zip(*ranked, strict=True)))
            nodes, reach = trees.frontier(start, budget.width, depth, last_depths, ranked, most)
            if not budget.goes_on(gains, num_slots, depth, reach, width):
                return gains
            parents = trees.parents[:, : trees.num_nodes]
            level, scored = make_expansion(depth, trees.tokens, parents, nodes, self._layout, warp)
            outputs, depth, width = self.scorer.expand(batch, level), depth + 1, level.tokens.shape[1]

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict) -> list[int]:
        """Updates the estimates with the verdict; returns how many accepted drafts have rows in the draft's cache.

        `tree` is as `propose` returned it, or begins with that in the sequences that drafted.
        """
        rows = [0] * len(batch.sequences)
        for slot, sequence in enumerate(batch.sequences):
            known: AcceptanceEstimate = sequence.draft_state.estimate
            if self._trees is None:
                known.learn_length(False, 0)
                continue
            chosen = self._chosen[slot]
            path = own_path(verdict, slot, len(chosen))
            known.learn_length(slot in self._able, len(path) - 1)
            if slot in self._able:
                known.learn_ranks(self._trees, slot, chosen, path)
            rows[slot] = self._layout.num_kept(slot, list(map(chosen.__getitem__, path[1:])))
        return rows
