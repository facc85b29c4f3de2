# SPDX-License-Identifier: Apache-2.0
"""Draft trees grown depth by depth with a scorer, by confidence and measured costs.

Drafts are the likeliest candidates, never drawn; in sequences that sample, the likeliest to win the target's race. They
do not change the text at any temperature, so the sequences of a batch decide together, and known candidates may be left
out.
"""

from __future__ import annotations

from collections.abc import Sequence

from speccompile.core.acceptance import Verdict
from speccompile.core.protocols import Batch, Outputs, StepTimes
from speccompile.core.tree import TokenTree
from speccompile.drafting.acceptance import AcceptanceEstimate, SharedPrior, own_path
from speccompile.drafting.budget import Budget, Outlook
from speccompile.drafting.candidates import Candidates, tree_from_candidates
from speccompile.drafting.expansion import DraftLayout, Scorer, make_expansion
from speccompile.drafting.grammars import allowed_in, draft_warp, has_grammars, path_of, restrict
from speccompile.drafting.race import raced_candidates
from speccompile.drafting.state import estimates


class TreeGrower:
    """Grows draft trees for a batch; the estimates are in each sequence's `draft_state`.

    Args:
        log_odds: initial log(odds of acceptance / odds given by the confidence) of a new sequence.
        max_fed: most nodes that one expansion feeds; None: as many as are scored.
        num_candidates: candidates to keep for each expanded node; None: all that the draft gives.
        races_probs: sequences that sample race over the draft's distributions, as its candidates are few; and grammars
            choose among all tokens.
    """

    def __init__(
        self,
        scorer: Scorer,
        budget: Budget,
        log_odds: float = 0.0,
        *,
        max_fed: int | None = None,
        num_candidates: int | None = None,
        races_probs: bool = False,
    ) -> None:
        self.scorer, self.budget, self._log_odds = scorer, budget, log_odds
        self._num_candidates, self._races_probs = num_candidates, races_probs
        self._max_fed = max(budget.max_nodes, 1) if max_fed is None else max_fed
        self._prior = SharedPrior(budget.max_depth)
        self._trees: list[Candidates] = []  # of the last step; empty where nothing was drafted
        self._chosen: list[list[int]] = []
        self._able: list[int] = []  # slots that drafted in the last step
        self._rows = DraftLayout(0, 1)

    @property
    def outlook(self) -> Outlook | None:
        return self.budget.outlook

    def new_estimate(self) -> AcceptanceEstimate:
        return AcceptanceEstimate(self._prior, self._log_odds)

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        self.budget.observe(num_slots, num_nodes, times)

    def propose(self, batch: Batch) -> TokenTree:
        """Returns trees; a sequence that cannot or should not draft has its root alone."""
        sequences, self._trees = batch.sequences, []
        self.budget.is_forced = batch.is_forced and self.budget.width == 1
        self.budget.least = batch.least_drafts
        rooms = [
            self.scorer.room(slot, sequence) if sequence.max_drafts > 0 else -1
            for slot, sequence in enumerate(sequences)
        ]
        able = [slot for slot, room in enumerate(rooms) if room >= 0]
        known = estimates(sequences)
        accepted = sum(known[slot].accepted_length for slot in able) / len(sequences)
        if not able or not self.budget.begins(accepted, len(sequences)):
            return TokenTree.roots([sequence.tokens[-1] for sequence in sequences])
        trees = [Candidates.from_root(sequence.tokens[-1]) for sequence in sequences]
        limits = [sequence.max_drafts if rooms[slot] >= 0 else 0 for slot, sequence in enumerate(sequences)]
        spent_ms = self._grow(batch, trees, able, [min(r, n - 1) for r, n in zip(rooms, limits, strict=True)])
        num_drafts = self.budget.size(trees, spent_ms)
        tree, self._chosen = tree_from_candidates(trees, num_drafts, limits)
        self._trees, self._able = trees, able
        return tree

    def _grow(self, batch: Batch, trees: list[Candidates], able: Sequence[int], last_depths: Sequence[int]) -> float:
        """Adds candidates as long as they are worth their time; returns the milliseconds spent.

        Args:
            last_depths: by slot, the depth of the deepest node that may be expanded.
        """
        budget, num_slots = self.budget, len(trees)
        self._rows = rows = DraftLayout(num_slots, self._max_fed)
        reads_probs = self._races_probs and (not batch.is_greedy or has_grammars(batch))
        warp = draft_warp(batch) if reads_probs else {}
        outputs = self.scorer.begin(batch, able, warp)
        spent_ms = budget.spend(num_slots, num_slots)
        scored = [[0] if limit >= 0 else [] for limit in last_depths]
        depth = 0
        while True:
            starts = self._add(batch, depth + 1, trees, scored, outputs)
            depth += 1
            frontiers, reach = [], 0.0
            for slot, tree in enumerate(trees):
                goes = bool(scored[slot]) and depth <= last_depths[slot]
                frontier = tree.likeliest(starts[slot], budget.width) if goes else []
                reach += sum([tree.paths[c] for c in frontier])
                frontiers.append(frontier)
            if reach <= 0 or not budget.goes_on(trees, depth, reach, spent_ms):
                return spent_ms
            level, scored = make_expansion(depth, trees, frontiers, rows, warp)
            outputs = self.scorer.expand(batch, level)
            if not budget.runs_once:
                spent_ms += budget.spend(num_slots, level.tokens.size)

    def _add(
        self, batch: Batch, depth: int, trees: Sequence[Candidates], scored: Sequence[Sequence[int]], outputs: Outputs
    ) -> list[int]:
        """Adds the candidates after the scored nodes, at `depth`; returns the first new candidate of each slot."""
        if has_grammars(batch):
            paths = [[path_of(tree, node) for node in nodes] for tree, nodes in zip(trees, scored, strict=True)]
            outputs = restrict(batch, paths, outputs)
        ordered = raced_candidates(batch, depth, outputs)
        tokens, sure = (part[:, :, : self._num_candidates].tolist() for part in ordered)
        known, floor = estimates(batch.sequences), self.budget.floor(trees)
        starts = []
        for slot, tree in enumerate(trees):
            starts.append(len(tree.tokens))
            probs, is_free = known[slot].probs, batch.sequences[slot].grammar is None
            for column, node in enumerate(scored[slot]):
                found, confidences = tokens[slot][column], sure[slot][column]
                if not is_free:  # the race leaves refused ones among the others
                    pairs = zip(found, confidences, strict=True)
                    allows = allowed_in(batch.sequences[slot].grammar, tree)
                    kept = [(t, sure) for t, sure in pairs if allows is None or allows(node, t)]
                    found, confidences = [t for t, _ in kept], [sure for _, sure in kept]
                tree.add(node, found, probs(confidences), floor)
        return starts

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict) -> list[int]:
        """Updates the estimates with the verdict.

        Args:
            tree: as returned by `propose`, or one that begins with it in the sequences that drafted.

        Returns:
            By slot, how many of the accepted drafts have their rows in the draft's cache.
        """
        rows = list[int]()
        for slot, known in enumerate(estimates(batch.sequences)):
            if not self._trees:
                known.learn_length(False, 0)
                rows.append(0)
                continue
            chosen = self._chosen[slot]
            path = own_path(verdict, slot, len(chosen))
            known.learn_length(slot in self._able, len(path) - 1)
            if slot in self._able:
                known.learn_ranks(self._trees[slot], chosen, path)
            rows.append(self._rows.num_kept(slot, [chosen[node] for node in path[1:]]))
        return rows
