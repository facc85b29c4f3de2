# SPDX-License-Identifier: Apache-2.0
"""Drafts chains and trees with one run of heads, from the target's hidden state of the token before the root.

Sequences with the most probable drafts decide together by confidences, verdicts and costs. Where chains are drawn each
sequence decides alone, only between the whole chain and none: leaving out a drawn token would change the output
distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from speccompile.core.protocols import Batch, Engine, Outputs, StepTimes, TokenSequence
from speccompile.core.specs import (
    CANDIDATE_PROBS,
    CANDIDATES,
    CHAIN_PROBS,
    CONFIDENCES,
    DRAFT_PARENTS,
    HIDDEN,
    SAMPLED_TOKENS,
    TOKENS,
    UNIFORMS,
    GraphSpec,
)
from speccompile.core.tree import Ints, TokenTree, Verdict
from speccompile.core.tree_shape import TreeShape
from speccompile.drafting.acceptance import AcceptanceEstimate, DraftState, SharedPrior, acceptance_probs, own_path
from speccompile.drafting.budget import Budget, Outlook
from speccompile.drafting.grammars import (
    chain_with_forced,
    drafts_within,
    drawn_chains_with_forced,
    force_candidates,
    has_grammars,
    paths_after,
    refuse,
    tree_within,
)
from speccompile.drafting.hidden import TargetStates
from speccompile.drafting.race import order_candidates
from speccompile.drafting.tree import DraftTrees, Probs
from speccompile.errors import RecipeError


class HeadsProposer:
    """A `Proposer` over heads. Raises RecipeError: the engine was built for another tree.

    Args:
        engine: the heads (`heads_spec`, `tree_heads_spec` or `candidate_heads_spec`).
        budget: bounds and costs; its draft costs are those of one run.
        shape: fixed shape of the tree; None: as many of the candidates as are worth their time.
        log_odds: initial log(odds of acceptance / odds given by the confidence) of a new sequence.
        may_draw: draw drafts from the heads' distributions in sequences that sample; for chains only.
        num_candidates: of each head, where it gives candidates by rank: how many are used; None: all.
    """

    catches_up = False
    caches = ()

    def __init__(
        self,
        engine: Engine,
        budget: Budget,
        shape: TreeShape | None,
        log_odds: float,
        *,
        may_draw: bool = False,
        num_candidates: int | None = None,
    ) -> None:
        spec = engine.spec
        self.is_chain, self.may_draw = spec.gives_probs, may_draw and spec.gives_probs
        if not self.is_chain:
            _check_tree(spec, shape)
        self.engine, self.budget, self.shape, self._log_odds = engine, budget, shape, log_odds
        self._num_candidates = num_candidates
        self._drawn = budget.recorded()
        width = spec.input(HIDDEN).dims[2]
        assert isinstance(width, int)
        self.states = TargetStates(width)
        self._reads_tokens = any(t.name == TOKENS for t in spec.inputs)
        self._prior = SharedPrior(budget.max_depth)
        self._grown: tuple[DraftTrees, list[list[int]]] | None = None
        self._drafting: Sequence[int] = ()  # slots that drafted in the last step
        self._num_nodes: list[int] = []  # by slot, of the last tree

    def start(self, slot: int, sequence: TokenSequence) -> None:
        """Gives the sequence a new estimate, and no hidden state."""
        self.states.flush()  # the target is about to read the prompt
        # Drawn drafts must not depend on other sequences, so their prior is not shared.
        is_drawn = self.may_draw and not sequence.sampling.is_greedy
        prior = SharedPrior(self.budget.max_depth) if is_drawn else self._prior
        sequence.draft_state = DraftState(AcceptanceEstimate(prior, self._log_odds))

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        """Returns `num_rows`: heads have no cache, and the token whose state they need is read in any case."""
        self.start(slot, sequence)
        return num_rows

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Keeps the hidden state of the last prompt token before the root."""
        if start + tokens.shape[1] == len(sequence.tokens) - 1:
            self.states.read(sequence, outputs[HIDDEN])

    def propose(self, batch: Batch) -> TokenTree:
        """Returns trees; a sequence that cannot or should not draft has its root alone, and padding."""
        tree = self._propose(batch)
        self._num_nodes = tree.num_nodes.tolist()
        return tree

    def _propose(self, batch: Batch) -> TokenTree:
        sequences, self._grown = batch.sequences, None
        self.budget.is_forced = batch.is_forced
        roots = np.array([sequence.tokens[-1] for sequence in sequences], dtype=np.int64)
        is_drawn = self.may_draw and batch.may_draw
        able = self.states.known(sequences, [p for p, sequence in enumerate(sequences) if sequence.max_drafts > 0])
        self._drafting = drafting = self._worth_drafting(able, sequences, is_drawn)
        if not drafting:
            return TokenTree.roots(roots)
        feeds: dict[str, Any] = {**self.states.feeds(sequences), **self.feeds_of(sequences)}
        if self._reads_tokens:
            feeds |= {TOKENS: roots[:, None]}
        if is_drawn:
            draws = [batch.draft_uniforms(depth) for depth in range(1, self.engine.spec.num_drafts + 1)]
            feeds |= {**batch.warp_feeds(), UNIFORMS: np.concatenate(draws, axis=1)}
        outputs = self.engine.run(feeds)
        limits = [sequence.max_drafts if slot in drafting else 0 for slot, sequence in enumerate(sequences)]
        if is_drawn:
            return drawn_chains_with_forced(batch, self._drawn_chain(roots, limits, outputs))
        if CANDIDATES in outputs:
            outputs = self._first(_raced(batch, outputs))
        self.budget.spend(len(sequences))
        if self.shape is not None:
            drafts = tree_from_shape(self.shape, roots, self._tokens_of_shape(outputs, self.shape), limits)
            return tree_within(batch, drafts)
        has_ranks, most = CANDIDATES in outputs, self.budget.max_nodes
        num = len(outputs[CANDIDATES][0]) * most if has_ranks else len(outputs[SAMPLED_TOKENS][0])
        trees = DraftTrees(roots, num)
        (self._grow if has_ranks else self._put)(batch, trees, limits, outputs)
        tree, chosen = trees.best(self.budget.size(trees.gains(most), len(roots)))
        self._grown = (trees, chosen)
        return tree

    @property
    def outlook(self) -> Outlook | None:
        return self.budget.outlook

    def feeds_of(self, sequences: Sequence[TokenSequence]) -> Outputs:
        """Returns further inputs of the engine for these slots; none by default."""
        del sequences
        return {}

    def _first(self, outputs: Outputs) -> Outputs:
        used = {name: np.asarray(outputs[name])[..., : self._num_candidates] for name in (CANDIDATES, CANDIDATE_PROBS)}
        return {**outputs, **used}

    def _worth_drafting(self, able: Sequence[int], sequences: Sequence[TokenSequence], is_drawn: bool) -> Sequence[int]:
        accepted = [sequence.draft_state.estimate.accepted_length for sequence in sequences]
        if is_drawn and not self.budget.is_forced:
            return [slot for slot in able if self._drawn.begins(accepted[slot], 1)]
        total = sum(accepted[slot] for slot in able)
        return able if able and self.budget.begins(total / len(sequences), len(sequences)) else ()

    def _drawn_chain(self, roots: Ints, limits: Sequence[int], outputs: Outputs) -> TokenTree:
        tokens = np.concatenate((roots[:, None], np.asarray(outputs[SAMPLED_TOKENS])), axis=1)
        num_nodes = 1 + np.minimum(limits, self.budget.max_depth).astype(np.int64)
        return TokenTree.chain(tokens, num_nodes, outputs[CHAIN_PROBS])

    def _tokens_of_shape(self, outputs: Outputs, shape: TreeShape) -> Ints:
        if CANDIDATES in outputs:
            heads, ranks = shape.depths()[1:] - 1, shape.ranks()[1:]
            return np.asarray(outputs[CANDIDATES])[:, heads, ranks]
        return np.asarray(outputs[SAMPLED_TOKENS])

    def _grow(self, batch: Batch, trees: DraftTrees, limits: Sequence[int], outputs: Outputs) -> None:
        tokens, confidences = np.array(outputs[CANDIDATES]), np.array(outputs[CANDIDATE_PROBS])
        for slot, sequence in enumerate(batch.sequences):
            if sequence.grammar is not None:
                force_candidates(sequence.grammar, tokens[slot], confidences[slot])
        known = [sequence.draft_state.estimate.factors(tokens.shape[2]) for sequence in batch.sequences]
        probs = acceptance_probs(np.array(known), confidences)
        add_products(batch, trees, limits, tokens, probs, self.budget.max_nodes)

    def _put(self, batch: Batch, trees: DraftTrees, limits: Sequence[int], outputs: Outputs) -> None:
        """Adds the drafts that the heads themselves have chosen: a chain, or a tree with its parents."""
        floor = self.budget.floor(len(batch.sequences)) if self.is_chain else 0.0
        rows = {
            n: np.asarray(outputs[n]).tolist() for n in (SAMPLED_TOKENS, CONFIDENCES, DRAFT_PARENTS) if n in outputs
        }
        for slot in self._drafting:
            sequence = batch.sequences[slot]
            num = self.budget.max_depth if self.is_chain else None
            drafts, sure = rows[SAMPLED_TOKENS][slot][:num], rows[CONFIDENCES][slot][:num]
            if self.is_chain:
                drafts, sure = chain_with_forced(sequence.grammar, drafts, sure)
            above = range(len(drafts)) if self.is_chain else rows[DRAFT_PARENTS][slot]
            kept, parents = drafts_within(sequence.grammar, drafts, above)
            drafts, sure = [drafts[draft] for draft in kept], [sure[draft] for draft in kept]
            put_drafts(trees, slot, drafts, sure, parents, sequence.draft_state.estimate, floor, limits[slot])

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Keeps the hidden states of the paths' last nodes, and updates the estimates."""
        self.skip(batch, verdict, outputs)
        for slot, sequence in enumerate(batch.sequences):
            known, has_drafted = sequence.draft_state.estimate, slot in self._drafting
            known.learn_length(has_drafted, len(own_path(verdict, slot, self._num_nodes[slot])) - 1)
            if self._grown is not None and has_drafted:
                trees, chosen = self._grown
                known.learn_ranks(trees, slot, chosen[slot], own_path(verdict, slot, len(chosen[slot])))

    def skip(self, batch: Batch, verdict: Verdict, outputs: Outputs) -> None:
        last = [verdict.path[slot, num] for slot, num in enumerate(verdict.num_accepted.tolist())]
        self.states.keep(batch.sequences, outputs[HIDDEN], np.array(last, dtype=np.int64))

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        self.budget.observe(num_slots, num_nodes, times)

    def flush(self) -> None:
        self.states.flush()


def _raced(batch: Batch, outputs: Outputs) -> Outputs:
    if batch.is_greedy:
        return outputs
    tokens, sure = np.asarray(outputs[CANDIDATES]), np.asarray(outputs[CANDIDATE_PROBS])
    pairs = [order_candidates(batch, 1 + h, tokens[:, h : h + 1], sure[:, h : h + 1]) for h in range(tokens.shape[1])]
    made = [np.concatenate(parts, axis=1) for parts in zip(*pairs, strict=True)]
    return {**outputs, CANDIDATES: made[0], CANDIDATE_PROBS: made[1]}


def _check_tree(spec: GraphSpec, shape: TreeShape | None) -> None:
    """Refuses a tree that heads cannot draft: those by rank draft any tree within theirs, others only their own."""
    outputs, todo = {t.name: t.dims for t in spec.outputs}, "Build the bundle again with this tree, or ask for its own."
    got = "tree: chain or auto" if shape is None else f"a shape of {shape.num_drafts} draft tokens"
    if CANDIDATES in outputs:
        _, heads, ranks = outputs[CANDIDATES]
        assert isinstance(heads, int) and isinstance(ranks, int)
        if shape is not None and (shape.max_depth > heads or shape.max_rank >= ranks):
            raise RecipeError("speculator.tree", got, f"a depth of at most {heads} and ranks below {ranks}", todo)
    elif DRAFT_PARENTS in outputs:
        if shape is not None:
            raise RecipeError("speculator.tree", got, "tree: auto, as the engine was built", todo)
    elif shape is None or shape.num_drafts != outputs[SAMPLED_TOKENS][1]:
        expected = f"the shape of {outputs[SAMPLED_TOKENS][1]} draft tokens that the engine was built with"
        raise RecipeError("speculator.tree", got, expected, todo)


def add_products(batch: Batch, trees: DraftTrees, limits: Sequence[int], tokens: Ints, probs: Probs, most: int) -> None:
    """Adds the most probable paths of candidates that are the same after every node of a depth.

    Args:
        limits: by slot, most draft tokens on a path; 0: the sequence does not draft.
        tokens, probs: [slots, depths, candidates] int64, float64.
        most: candidates that a sequence keeps at each depth, at least 1.
    """
    nodes: Ints = np.zeros((len(limits), 1), dtype=np.int64)
    for depth in range(tokens.shape[1]):
        shape = (*nodes.shape, tokens.shape[2])
        nodes = np.where(np.greater(limits, depth)[:, None], nodes, -1)
        after, chance = np.broadcast_to(tokens[:, [depth]], shape), np.broadcast_to(probs[:, [depth]], shape)
        if has_grammars(batch):
            chance = refuse(batch, paths_after(batch, trees, nodes), after, chance)
        start = trees.add(nodes, after, chance, most)
        nodes = np.broadcast_to(np.arange(start, trees.num_nodes), (len(limits), trees.num_nodes - start))


def put_drafts(
    trees: DraftTrees,
    slot: int,
    tokens: Sequence[int],
    confidences: Sequence[float],
    parents: Sequence[int],
    known: AcceptanceEstimate,
    floor: float,
    limit: int,
) -> None:
    """Gives a sequence its drafts, whose parents are given; those of one parent stand together."""
    ranks = [at - parents.index(parent) for at, parent in enumerate(parents)]
    num = 1 + max(ranks, default=0)
    sure = np.zeros((1, len(parents), num))
    sure[0, [at - rank for at, rank in enumerate(ranks)], ranks] = confidences
    probs = acceptance_probs(np.array([known.factors(num)]), sure)[0]
    chances = [float(probs[at - rank, rank]) for at, rank in enumerate(ranks)]
    trees.put(slot, tokens, parents, chances, ranks, floor=floor, limit=limit)


def tree_from_shape(shape: TreeShape, roots: Ints, drafts: Ints, limits: Sequence[int]) -> TokenTree:
    """Returns the same shape, whole depths first, in every sequence, as deep as its `limits` allow.

    `roots` are [batch], `drafts` [batch, shape.num_drafts], both int64.
    """
    num_nodes = np.searchsorted(shape.depths(), np.array(limits), side="right").astype(np.int64)
    nodes = int(num_nodes.max())
    tokens = np.concatenate((roots[:, None], drafts), axis=1)[:, :nodes]
    if shape.is_chain:
        return TokenTree.chain(tokens, num_nodes)
    used = np.arange(nodes) < num_nodes[:, None]
    return TokenTree(tokens, np.where(used, shape.parents()[:nodes], -1), num_nodes)
