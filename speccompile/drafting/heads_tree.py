# SPDX-License-Identifier: Apache-2.0
"""Drafts trees in one run of heads, from the target's hidden state behind the root.

The drafts are the likeliest tokens, never drawn: the text is the target's own at any temperature, whatever is
drafted. So a tree may be cut by confidence, verdicts and costs; slots of a batch decide together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np

from speccompile.core.acceptance import Verdict
from speccompile.core.protocols import Batch, Engine, Outputs, Slot
from speccompile.core.specs import (
    CONFIDENCES,
    DRAFT_PARENTS,
    GUESS_PROBS,
    GUESSES,
    HIDDEN,
    SAMPLED_TOKENS,
    TOKENS,
    GraphSpec,
)
from speccompile.core.tree import Ints, TokenTree
from speccompile.core.tree_shape import TreeShape
from speccompile.drafting.growth import Calibration, Candidates, GrowthPolicy, Reach, Usual, tree_from_candidates
from speccompile.drafting.hidden import TargetStates
from speccompile.drafting.home_rate import HomeRate
from speccompile.drafting.state import DraftState, TreeLessons, tree_lessons
from speccompile.errors import RecipeError

FIRST_RATE = 0.7  # acceptance rate of a path's tokens before anything is known


class HeadsTreeProposer:
    """See `speccompile.core.protocols.Proposer`.

    Args:
        engine: the heads (`tree_heads_spec` or `guessing_heads_spec`).
        policy: bounds and costs; `draft` costs are those of one run.
        shape: what is scored in every step; None: as many of the candidates as pay.
        log_odds: of a guess being right over the odds that its confidence means, for a fresh slot.

    Raises:
        RecipeError: the engine was built for another tree.
    """

    catches_up = False
    caches = ()

    def __init__(self, engine: Engine, policy: GrowthPolicy, shape: TreeShape | None, log_odds: float) -> None:
        _check_tree(engine.spec, shape)
        self.engine, self.policy, self.shape, self._log_odds = engine, policy, shape, log_odds
        width = engine.spec.input(HIDDEN).dims[2]
        assert isinstance(width, int)
        self.states = TargetStates(width)
        self._reads_tokens = any(t.name == TOKENS for t in engine.spec.inputs)
        self._home = HomeRate(sum(FIRST_RATE**depth for depth in range(1, policy.max_depth + 1)))
        self._grown: tuple[list[Candidates], list[list[int]]] | None = None
        self._drafting: list[int] = []  # slots that drafted in the last step
        drafts = min(policy.max_nodes, policy.max_depth) if shape is None else shape.num_drafts
        self._usual = Usual(drafts, 1)

    def start(self, slot: int, sequence: Slot) -> None:
        """Nothing is known of it."""
        self.states.settle()  # the target is about to read the prompt
        sequence.draft_state = DraftState(TreeLessons(Reach(self._home), Calibration(self._log_odds)))

    def resume(self, slot: int, sequence: Slot, num_rows: int) -> int:
        """Heads have no rows; the state that they need is behind a token that is read in any case."""
        self.start(slot, sequence)
        return num_rows

    def prefill(self, slot: int, sequence: Slot, tokens: Ints, start: int, outputs: Outputs) -> None:
        """Keep the state behind the last token that was read: the root follows it."""
        if start + tokens.shape[1] == len(sequence.tokens) - 1:
            self.states.read(sequence, outputs[HIDDEN])

    def propose(self, batch: Batch) -> TokenTree:
        """Trees; a slot that cannot draft is padded."""
        slots, self._grown, self._drafting = batch.slots, None, []
        roots = np.array([slot.tokens[-1] for slot in slots], dtype=np.int64)
        able = self.states.known(slots, [p for p, slot in enumerate(slots) if slot.max_drafts > 0])
        lessons = tree_lessons(slots)
        kept = sum(lessons[place].reach.rate for place in able) / len(slots)
        if not able or not (batch.is_planned or self.policy.begins(kept, len(slots), self._usual)):
            return TokenTree.roots(roots)
        self._drafting = able
        feeds: dict[str, Any] = self.states.feeds(slots)
        outputs = self.engine.run({**feeds, TOKENS: roots[:, None]} if self._reads_tokens else feeds)
        limits = [slot.max_drafts if place in able else 0 for place, slot in enumerate(slots)]
        if self.shape is not None:
            return tree_from_shape(self.shape, roots, self._shaped(outputs, self.shape), limits)
        return self._grow(roots, {place: lessons[place].calibration for place in able}, limits, outputs)

    def _shaped(self, outputs: Outputs, shape: TreeShape) -> Ints:
        """[batch, drafts] int64: the tokens of a fixed shape."""
        if GUESSES in outputs:
            heads, ranks = shape.depths()[1:] - 1, shape.ranks()[1:]
            return np.asarray(outputs[GUESSES])[:, heads, ranks]
        return np.asarray(outputs[SAMPLED_TOKENS])

    def _grow(
        self, roots: Ints, calibrations: Mapping[int, Calibration], limits: Sequence[int], outputs: Outputs
    ) -> TokenTree:
        """Trees of the slots that draft, by whose calibrations confidences are read."""
        trees = [Candidates.from_root(int(root)) for root in roots]
        rows = {name: np.asarray(value).tolist() for name, value in outputs.items()}
        for place, calibration in calibrations.items():
            if GUESSES in rows:
                probs = [calibration.probs(confidences) for confidences in rows[GUESS_PROBS][place]]
                grow_product(trees[place], rows[GUESSES][place], probs, self.policy.max_nodes)
            else:
                parents = rows[DRAFT_PARENTS][place]
                add_drafts(trees[place], rows[SAMPLED_TOKENS][place], rows[CONFIDENCES][place], parents, calibration)
        spent_ms = self.policy.draft.ms(len(roots)) if self.policy.weighs_time else 0.0
        num_drafts = self.policy.size(trees, spent_ms)
        self._usual.learn(num_drafts, 1)
        if num_drafts == 0:
            return TokenTree.roots(roots)
        tree, chosen = tree_from_candidates(trees, num_drafts, limits)
        self._grown = (trees, chosen)
        return tree

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict, outputs: Outputs) -> None:
        """Keep the states behind the paths' last nodes, and learn."""
        accepted = verdict.num_accepted
        last = accepted if tree.is_chain else verdict.path[np.arange(tree.batch), accepted]
        self.states.keep(batch.slots, outputs[HIDDEN], last)
        num_nodes, num_accepted = tree.num_nodes.tolist(), accepted.tolist()
        for place, lessons in enumerate(tree_lessons(batch.slots)):
            lessons.reach.learn(place in self._drafting, num_accepted[place])
            if self._grown is not None and num_nodes[place] > 1:
                trees, chosen = self._grown
                lessons.calibration.learn(trees[place], chosen[place], verdict.nodes_kept(place))

    def settle(self) -> None:
        """Bring the states to the host."""
        self.states.settle()


def _check_tree(spec: GraphSpec, shape: TreeShape | None) -> None:
    """The engine can draft the tree: heads that guess draft every tree within their guesses, others but one."""
    outputs, todo = {t.name: t.dims for t in spec.outputs}, "Build the bundle again with this tree, or ask for its own."
    got = "tree: chain or auto" if shape is None else f"a shape of {shape.num_drafts} draft tokens"
    if GUESSES in outputs:
        _, heads, ranks = outputs[GUESSES]
        assert isinstance(heads, int) and isinstance(ranks, int)
        if shape is not None and (shape.max_depth > heads or shape.max_rank >= ranks):
            raise RecipeError("speculator.tree", got, f"a depth of at most {heads} and ranks below {ranks}", todo)
    elif DRAFT_PARENTS in outputs:
        if shape is not None:
            raise RecipeError("speculator.tree", got, "tree: auto, as the engine was built", todo)
    elif shape is None or shape.num_drafts != outputs[SAMPLED_TOKENS][1]:
        expected = f"the shape of {outputs[SAMPLED_TOKENS][1]} draft tokens that the engine was built with"
        raise RecipeError("speculator.tree", got, expected, todo)


def tree_from_shape(shape: TreeShape, roots: Ints, drafts: Ints, limits: Sequence[int]) -> TokenTree:
    """The same shape in every slot, as deep as each may go.

    Args:
        shape: of the tree; whole depths come first in it.
        roots: [batch] int64.
        drafts: [batch, shape.num_drafts] int64.
        limits: most draft tokens on a path, by slot.
    """
    depths = shape.depths()
    num_nodes = np.searchsorted(depths, np.array(limits), side="right").astype(np.int64)
    nodes = int(num_nodes.max())
    tokens = np.concatenate((roots[:, None], drafts), axis=1)[:, :nodes]
    if shape.is_chain:
        return TokenTree.chain(tokens, num_nodes)
    used = np.arange(nodes) < num_nodes[:, None]
    return TokenTree(tokens, np.where(used, shape.parents()[:nodes], -1), num_nodes)


def grow_product(
    tree: Candidates, guesses: Sequence[Sequence[int]], probs: Sequence[Sequence[float]], num: int
) -> None:
    """Add the `num` likeliest nodes where the guesses at a depth are the same behind every node above.

    Args:
        tree: of the root alone.
        guesses: by depth, the likeliest first.
        probs: of each guess.
        num: nodes to add.
    """
    # A node is worth as much as its path, so the next best is a sibling or a first child of one that is in already.
    heap = [(-probs[0][0], 0, 0, 0)]  # (minus the path's probability, parent, depth of the parent, rank)
    while heap and len(tree.tokens) <= num:
        _, parent, depth, rank = heappop(heap)
        tree.add(parent, [guesses[depth][rank]], [probs[depth][rank]], first_rank=rank)
        if rank + 1 < len(probs[depth]):
            heappush(heap, (-tree.paths[parent] * probs[depth][rank + 1], parent, depth, rank + 1))
        if depth + 1 < len(probs):
            heappush(heap, (-tree.paths[-1] * probs[depth + 1][0], len(tree.tokens) - 1, depth + 1, 0))


def add_drafts(
    tree: Candidates,
    tokens: Sequence[int],
    confidences: Sequence[float],
    parents: Sequence[int],
    calibration: Calibration,
) -> None:
    """Add drafts whose parents are given; those of one parent stand together.

    Args:
        tree: of the root alone.
        tokens: by draft.
        confidences: of each.
        parents: of each, a candidate of the tree.
        calibration: of the slot.
    """
    start = 0
    while start < len(parents):
        parent, end = parents[start], start
        while end < len(parents) and parents[end] == parent:
            end += 1
        tree.add(parent, tokens[start:end], calibration.probs(confidences[start:end]))
        start = end
