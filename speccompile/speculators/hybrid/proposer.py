# SPDX-License-Identifier: Apache-2.0
"""The proposer over those of several drafters.

Drafts are deterministic, so which drafter made them, and how that was decided, has no influence on a text. Each drafter
sees the sequences through `PartSequence`s and takes every step, scored or to read. Where trees are scored, what a
drafter without graphs has found may be a branch of another's tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

from numpy.typing import NDArray

from speccompile.core.jobs import MethodContext
from speccompile.core.proposer import CacheRows, Proposer
from speccompile.core.protocols import Batch, Outputs, StepTimes, TokenSequence
from speccompile.core.tree import Floats, Ints, TokenTree, Verdict
from speccompile.drafting.acceptance import AcceptanceEstimate, Foreseeing, SharedPrior, own_path
from speccompile.drafting.budget import Budget
from speccompile.drafting.tree import DraftTrees
from speccompile.speculators.hybrid.branch import Branches
from speccompile.speculators.hybrid.choice import DrafterCosts, Offer, choose

TYPICAL_DEPTH = 6  # of a draft, for the accepted length before any verdict
TYPICAL_MEMORY = 0.9  # weight of the past in the number of drafts of a step


class PartSequence:
    """A `TokenSequence` as one drafter sees it, with an estimate of the accepted length of its drafts."""

    __slots__ = ("draft_state", "estimate", "grammar", "has_draft", "max_drafts", "num_read", "sampling", "tokens")

    def __init__(self, sequence: TokenSequence, estimate: AcceptanceEstimate, has_draft: bool) -> None:
        self.tokens, self.sampling = sequence.tokens, sequence.sampling  # the list that the sequence goes on with
        self.estimate, self.has_draft, self.grammar = estimate, has_draft, sequence.grammar
        self.draft_state: Any = None
        self.max_drafts = 0
        self.num_read = 0  # tokens before the root that it has read

    @property
    def num_missed(self) -> int:
        return len(self.tokens) - 1 - self.num_read


class PartBatch:
    """A batch as one drafter sees it: nothing is drawn. See `speccompile.core.protocols.Batch`."""

    may_draw = False

    def __init__(self, batch: Batch, parts: Sequence[PartSequence]) -> None:
        self._batch, self.parts = batch, parts
        self.is_forced, self.is_greedy, self.least_drafts = batch.is_forced, batch.is_greedy, batch.least_drafts

    @property
    def sequences(self) -> Sequence[TokenSequence]:
        return self.parts

    def warp_feeds(self) -> dict[str, NDArray[Any]]:
        return self._batch.warp_feeds()

    def race_draws(self, depth: int) -> Floats:
        return self._batch.race_draws(depth)

    def draft_uniforms(self, depth: int, num: int = 1) -> Floats:
        return self._batch.draft_uniforms(depth, num)


@dataclass(frozen=True, eq=False)
class Drafter:
    """One of the drafters."""

    proposer: Proposer
    costs: DrafterCosts | None  # of its graphs; None: it has none, and drafts in every step


class HybridProposer:
    """A `Proposer`; a `draft_state` is a list of one `PartSequence` a drafter.

    Args:
        drafters: at least one; of those without graphs, the first that expects the most comes first.
        has_trees: the target scores trees, so that drafts of two may be merged.
    """

    may_draw = False

    def __init__(self, drafters: Sequence[Drafter], context: MethodContext, *, has_trees: bool = False) -> None:
        self.drafters = tuple(drafters)
        self.catches_up = any(drafter.proposer.catches_up for drafter in drafters)
        self.caches: tuple[CacheRows, ...] = tuple(c for drafter in drafters for c in drafter.proposer.caches)
        self._held = [index for index, drafter in enumerate(drafters) if not drafter.proposer.catches_up]
        self._free = [index for index, drafter in enumerate(drafters) if drafter.costs is None]
        self.looks_up = bool(self._free)
        self._costly = [(index, drafter.costs) for index, drafter in enumerate(drafters) if drafter.costs is not None]
        most = context.max_draft_nodes
        self.budget = Budget(most, most, 1, context.costs.get("target"))
        self._priors = [SharedPrior(min(most, TYPICAL_DEPTH)) for _ in drafters]
        self._foresees = [isinstance(drafter.proposer, Foreseeing) for drafter in drafters]
        self._branches = Branches(self.budget) if has_trees else None
        self._parts: list[PartBatch] = []  # of the last step, by drafter
        self._num_nodes: dict[int, list[int]] = {}  # of its trees, by drafter and slot
        self._picks: list[int] = []  # by slot, the drafter whose tree was scored
        self._ran = -1  # the drafter with graphs that ran in the last step
        self._run: tuple[float, int] = (0.0, 0)  # what was expected of it, and the most tokens that it had to read
        self._seconds = [0.0] * len(self.drafters)  # of the last step, by drafter

    def start(self, slot: int, sequence: TokenSequence) -> None:
        self._make_parts(sequence)
        for drafter, part in zip(self.drafters, sequence.draft_state, strict=True):
            drafter.proposer.start(slot, part)

    def _make_parts(self, sequence: TokenSequence) -> None:
        is_read = len(sequence.tokens) == 1  # there is no prompt before the root
        sequence.draft_state = [
            PartSequence(sequence, AcceptanceEstimate(prior), drafter.proposer.catches_up or is_read)
            for drafter, prior in zip(self.drafters, self._priors, strict=True)
        ]

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """Returns how many rows no drafter needs again: all that draft go on from the same one."""
        self._make_parts(sequence)
        pairs = list[tuple[Proposer, PartSequence]]()
        for drafter, part in zip(self.drafters, sequence.draft_state, strict=True):
            if sequence.has_draft or drafter.proposer.catches_up:
                pairs.append((drafter.proposer, part))
            else:  # it does not read the prompt, so it has no part
                drafter.proposer.start(slot, part)
        num_kept = [proposer.resume(slot, part, num_rows) for proposer, part in pairs]
        while (least := min(num_kept)) < max(num_kept):
            for index, (proposer, part) in enumerate(pairs):
                if num_kept[index] > least:  # some keep one row less than they are given
                    num_kept[index] = proposer.resume(slot, part, least + 1)
                if num_kept[index] > least:
                    num_kept[index] = proposer.resume(slot, part, least)
        return least

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        end, last = start + tokens.shape[1], len(sequence.tokens) - 1
        for drafter, part in zip(self.drafters, sequence.draft_state, strict=True):
            drafter.proposer.prefill(slot, part, tokens, start, outputs)
            part.has_draft, part.num_read = part.has_draft or end == last, end

    def _batches(self, batch: Batch) -> list[PartBatch]:
        return [
            PartBatch(batch, [sequence.draft_state[index] for sequence in batch.sequences])
            for index in range(len(self.drafters))
        ]

    def propose(self, batch: Batch) -> TokenTree:
        """Returns, for each sequence, the drafts of the drafter that is expected to bring the most."""
        self._seconds, self._ran = [0.0] * len(self.drafters), -1
        parts, trees = self._batches(batch), dict[int, TokenTree]()
        self._parts, self._num_nodes, self.budget.is_forced = parts, {}, batch.is_forced
        if self._branches is not None:
            self._branches.begin()
        known, self._picks = [0.0] * len(batch.sequences), [-1] * len(batch.sequences)
        for index in self._free:
            trees[index] = self._draft(index, parts[index], [sequence.max_drafts for sequence in batch.sequences])
            for slot, expected in enumerate(self._expected_of(index, parts[index], trees[index])):
                if expected > known[slot]:
                    known[slot], self._picks[slot] = expected, index
        num_known = max(
            int(trees[pick].num_nodes[slot]) - 1 if pick >= 0 else 0 for slot, pick in enumerate(self._picks)
        )
        offers = [self._offer(index, costs, batch, parts[index]) for index, costs in self._costly]
        taken, lookups = choose(known, num_known, offers, self._scores(batch)), list(self._picks)
        if taken >= 0:
            self._run_costly(self._costly[taken][0], offers[taken], batch, parts, trees, known)
        for index, _ in self._costly:
            if index != self._ran:
                self.drafters[index].proposer.flush()  # the target is about to run
        if not trees or all(pick < 0 for pick in self._picks):
            return TokenTree.roots([sequence.tokens[-1] for sequence in batch.sequences])
        self._num_nodes = {index: tree.num_nodes.tolist() for index, tree in trees.items()}
        tree = self._picked(batch, trees)
        if self._branches is None or self._ran < 0:
            return tree
        return self._with_lookups(tree, lookups, known, offers[taken])

    def _picked(self, batch: Batch, trees: dict[int, TokenTree]) -> TokenTree:
        if len(batch.sequences) == 1:
            return trees[self._picks[0]]
        trees[-1] = TokenTree.roots([sequence.tokens[-1] for sequence in batch.sequences])
        names = sorted(trees)
        return merge_trees([trees[name] for name in names], [names.index(pick) for pick in self._picks])

    def _with_lookups(self, tree: TokenTree, lookups: Sequence[int], known: Sequence[float], offer: Offer) -> TokenTree:
        assert self._branches is not None
        found, expected = list[DraftTrees | None](), 0.0
        for slot, (pick, lookup) in enumerate(zip(self._picks, lookups, strict=True)):
            is_other = pick == self._ran
            expected += offer.expected[slot] if is_other else known[slot]
            is_merged = is_other and lookup >= 0 and self._foresees[lookup]
            proposer = self.drafters[lookup].proposer
            found.append(cast("Foreseeing", proposer).offered if is_merged else None)
        return self._branches.add(tree, found, expected, offer.ms)

    def _draft(self, index: int, part: PartBatch, limits: Sequence[int]) -> TokenTree:
        for sequence, limit in zip(part.parts, limits, strict=True):
            sequence.max_drafts = limit
        start_s = perf_counter()
        tree = self.drafters[index].proposer.propose(part)
        self._seconds[index] = perf_counter() - start_s
        return tree

    def _expected_of(self, index: int, part: PartBatch, tree: TokenTree) -> list[float]:
        proposer = self.drafters[index].proposer
        if self._foresees[index]:  # it learns from all that is emitted, not from its own drafts alone
            return list(cast("Foreseeing", proposer).foreseen)
        rows = zip(part.parts, tree.num_nodes.tolist(), strict=True)
        return [sequence.estimate.accepted_length if num > 1 else 0.0 for sequence, num in rows]

    def _scores(self, batch: Batch) -> Sequence[float]:
        is_known = self.budget.weighs_time and all(costs.is_known for _, costs in self._costly)
        return () if batch.is_forced or not is_known else self.budget.costs.scores(len(batch.sequences))

    def _offer(self, index: int, costs: DrafterCosts, batch: Batch, part: PartBatch) -> Offer:
        pairs = list(zip(batch.sequences, part.parts, strict=True))
        able = [sequence.max_drafts > 0 and own.has_draft for sequence, own in pairs]
        expected = [
            own.estimate.accepted_length if is_able else 0.0 for (_, own), is_able in zip(pairs, able, strict=True)
        ]
        mean = sum(expected) / max(sum(able), 1)
        missed = max((own.num_missed for (_, own), is_able in zip(pairs, able, strict=True) if is_able), default=0)
        return Offer(expected, round(costs.num_drafts), costs.ms(len(able), mean, missed))

    def _run_costly(
        self,
        index: int,
        offer: Offer,
        batch: Batch,
        parts: Sequence[PartBatch],
        trees: dict[int, TokenTree],
        known: Sequence[float],
    ) -> None:
        wins = [more > less for less, more in zip(known, offer.expected, strict=True)]
        limits = [sequence.max_drafts if is_won else 0 for sequence, is_won in zip(batch.sequences, wins, strict=True)]
        trees[index] = self._draft(index, parts[index], limits)
        nums = trees[index].num_nodes.tolist()
        drafted = [num > 1 for num in nums]
        self._ran = index
        if any(drafted) and (costs := self.drafters[index].costs) is not None:
            mean = sum(num - 1 for num in nums) / sum(drafted)
            costs.num_drafts += (1 - TYPICAL_MEMORY) * (mean - costs.num_drafts)
        won = [own for own, is_won in zip(parts[index].parts, wins, strict=True) if is_won]
        mean = sum(own.estimate.accepted_length for own in won) / len(won)
        self._run = (mean, max(own.num_missed for own in won))
        self._picks = [index if is_drafted else pick for is_drafted, pick in zip(drafted, self._picks, strict=True)]

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Gives every drafter the verdict: to learn from, to keep rows, or to read later."""
        if self._branches is not None:
            self._branches.learn(tree, verdict)
        for index, (drafter, part) in enumerate(zip(self.drafters, self._parts, strict=True)):
            if drafter.costs is None or index == self._ran:
                drafter.proposer.commit(part, tree, verdict, outputs)
            else:
                drafter.proposer.skip(part, verdict, outputs)
            self._learn(index, part, verdict)

    def _learn(self, index: int, part: PartBatch, verdict: Verdict) -> None:
        for slot, (sequence, pick) in enumerate(zip(part.parts, self._picks, strict=True)):
            own = len(own_path(verdict, slot, self._num_nodes[index][slot])) - 1 if pick == index else 0
            sequence.estimate.learn_length(pick == index, own)
            if pick == index:
                sequence.num_read = len(sequence.tokens) + own

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None:
        for index in self._held:
            parts: list[PartSequence] = [sequence.draft_state[index] for sequence in batch.sequences]
            if any(part.has_draft for part in parts):
                self.drafters[index].proposer.skip(PartBatch(batch, parts), verdict, outputs)

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        """Corrects the costs of all; a drafter's own ones count its own drafting alone."""
        self.budget.observe(num_slots, num_nodes, times)
        for index, drafter in enumerate(self.drafters):
            own_s = self._seconds[index]
            own = StepTimes(own_s, times.score_s, times.step_s - times.propose_s + own_s)
            drafter.proposer.observe(num_slots, num_nodes, own)
        for index, costs in self._costly:
            if index != self._ran:
                costs.rest(num_slots)
            elif index in self._picks:
                costs.observe(num_slots, *self._run, self._seconds[index])
        self._seconds, self._ran = [0.0] * len(self.drafters), -1

    def flush(self) -> None:
        """Reads what is left of the target's outputs for every drafter that needs it."""
        for index in self._held:
            self.drafters[index].proposer.flush()


def merge_trees(trees: Sequence[TokenTree], picks: Sequence[int]) -> TokenTree:
    """Returns the tree that has, in each sequence, one of these."""
    first = trees[picks[0]]
    if all(pick == picks[0] for pick in picks):
        return first
    rows = [trees[pick].nodes_of(slot) for slot, pick in enumerate(picks)]
    return TokenTree.ragged([tokens for tokens, _ in rows], [parents for _, parents in rows])
