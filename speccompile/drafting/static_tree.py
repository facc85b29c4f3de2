# SPDX-License-Identifier: Apache-2.0
"""Draft trees of one shape over a scorer: drafted, or drawn with siblings without replacement.

Where drafts are drawn, what is scored must not leave out a token because of what it is, or the output distribution
would be bent: a fixed shape does not, and a chain may end after any token, see `drawn_length`. A node whose
distribution has too little mass for all its siblings has fewer: it decides that, before the first of them is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.acceptance import Verdict
from speccompile.core.protocols import Batch, Outputs, StepTimes
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES, NODE_PROBS
from speccompile.core.tree import Floats, Ints, TokenTree
from speccompile.core.tree_shape import TreeShape
from speccompile.drafting.candidates import Candidates
from speccompile.drafting.drawn_length import DrawnChains, DrawnLength
from speccompile.drafting.expansion import DraftLayout, Expansion, Scorer, make_expansion
from speccompile.drafting.siblings import draw_siblings


class StaticTrees:
    """Drafts for a batch in one shape, as deep as each slot may go.

    Args:
        scorer: the draft.
        shape: of the tree; a level feeds no more nodes than it has drafts.
        may_sample: draw drafts in slots that sample; otherwise they are the likeliest candidates.
        vocab_size: of the target.
        d2t: [draft_vocab] int64, the target's token of each of the draft's; None: they are the same.
        length: where a drawn chain ends; None: drafts have the whole shape.
    """

    def __init__(
        self,
        scorer: Scorer,
        shape: TreeShape,
        *,
        may_sample: bool,
        vocab_size: int,
        d2t: Ints | None = None,
        length: DrawnLength | None = None,
    ) -> None:
        self._length = length if shape.is_chain and may_sample else None
        self.scorer, self.shape, self.may_sample, self._d2t, self._vocab = scorer, shape, may_sample, d2t, vocab_size
        self._parents = shape.parents().tolist()
        ranks = shape.ranks().tolist()
        self._levels: list[list[tuple[int, list[int], list[int]]]] = []  # by depth: (node, its children, their ranks)
        for depth in range(shape.max_depth):
            level = []
            for node in shape.level(depth):
                children = [c for c in shape.level(depth + 1) if self._parents[c] == node]
                if children:
                    level.append((node, children, [ranks[c] for c in children]))
            self._levels.append(level)
        self._plans = self._plan_levels()
        self._rows: DraftLayout | None = None
        self._kept: list[list[int]] = []
        self._fed: list[int] = []  # by slot, the deepest level that was read
        self._chains: DrawnChains | None = None
        self._dists: dict[int, Floats] = {}  # by batch: [batch, 1 + num_drafts, vocab]

    def _plan_levels(self) -> list[tuple[Expansion, DraftLayout]]:
        """What each level but the root's feeds, for one slot; tokens are filled in later."""
        num_drafts = self.shape.num_drafts
        shape, rows, plans = Candidates([0] * (1 + num_drafts), self._parents), DraftLayout(1, num_drafts), []
        for depth, nodes in enumerate(self._levels[1:], start=1):
            level, _ = make_expansion(depth, [shape], [[node for node, _, _ in nodes]], rows, {})
            held = DraftLayout(1, num_drafts)
            held.chains, held.columns = [list(rows.chains[0])], [list(rows.columns[0])]
            plans.append((level, held))
        return plans

    def new_estimate(self) -> None:
        """Nothing is learnt from one step to the next."""

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None:
        """Learns nothing: the shape is fixed."""

    def propose(self, batch: Batch) -> TokenTree:
        """Trees; a slot that cannot draft has its root alone."""
        slots, self._rows, self._kept, self._fed = batch.slots, None, [], [0] * len(batch.slots)
        roots = np.array([slot.tokens[-1] for slot in slots], dtype=np.int64)
        rooms = [self.scorer.room(place, slot) if slot.max_drafts > 0 else -1 for place, slot in enumerate(slots)]
        able = [place for place, room in enumerate(rooms) if room >= 0]
        is_drawn = self.may_sample and batch.may_draw
        self._chains = self._length.begin(batch) if self._length is not None and is_drawn else None
        if self._chains is not None:
            able = [place for place in able if self._chains.goes_on(place)]
        if not able:
            return TokenTree.roots(roots)
        limits = [min(slot.max_drafts, room + 1) for slot, room in zip(slots, rooms, strict=True)]
        drafts = _Drafts(self, batch, roots, is_drawn)
        drafts.take(0, able, self.scorer.begin(batch, able, drafts.warp))
        for depth, (plan, held) in enumerate(self._plans, start=1):
            places = [place for place in able if self._fed[place] == depth - 1 and limits[place] > depth]
            if self._chains is not None:
                places = [place for place in places if drafts.is_there[place, depth] and self._chains.goes_on(place)]
            if not places:
                break
            for place in places:
                self._fed[place] = depth
            drafts.take(depth, places, self.scorer.expand(batch, _for_batch(plan, drafts, places)))
            self._rows = held
        tree, self._kept = drafts.tree()
        return tree

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict) -> list[int]:
        """By slot, how many of the accepted drafts stand in their rows of the draft's cache."""
        if self._chains is not None:
            self._chains.learn(verdict.num_accepted.tolist())
        if self._rows is None:
            return [0] * tree.batch
        rows = []
        for place, num in enumerate(verdict.num_accepted.tolist()):
            path = verdict.path[place, 1 : num + 1].tolist()
            num_held = self._rows.num_kept(0, [self._kept[place][node] for node in path])
            rows.append(min(num_held, self._fed[place]))  # padding of levels without the slot stands after these
        return rows


def _for_batch(plan: Expansion, drafts: _Drafts, places: Sequence[int]) -> Expansion:
    batch, nodes = len(drafts.tokens), plan.nodes[0]
    if batch == 1:
        return replace(plan, tokens=drafts.tokens[:, nodes], warp=drafts.warp)
    takes_part = set(places)
    return Expansion(
        plan.depth,
        drafts.tokens[:, nodes],
        np.ascontiguousarray(np.broadcast_to(plan.tree_mask, (batch, len(nodes), len(nodes)))),
        np.ascontiguousarray(np.broadcast_to(plan.scored_nodes, (batch, plan.scored_nodes.shape[1]))),
        list(plan.num_in_place) * batch,
        [nodes if place in takes_part else () for place in range(batch)],
        [plan.parents[0] if place in takes_part else () for place in range(batch)],
        drafts.warp,
    )


class _Drafts:
    """The drafts of one step in the making; node numbers are the shape's."""

    def __init__(self, trees: StaticTrees, batch: Batch, roots: Ints, is_drawn: bool) -> None:
        self.trees, self.batch = trees, batch
        self.warp: Mapping[str, NDArray[Any]] = batch.warp_feeds() if is_drawn else {}
        size = 1 + trees.shape.num_drafts
        self.tokens = np.zeros((len(roots), size), dtype=np.int64)
        self.tokens[:, 0] = roots
        self.is_there = np.zeros((len(roots), size), dtype=np.bool_)
        self.is_there[:, 0] = True
        self.dists: Floats | None = None
        if is_drawn:
            if len(roots) not in trees._dists:
                trees._dists[len(roots)] = np.zeros((len(roots), size, trees._vocab), dtype=np.float32)
            self.dists = trees._dists[len(roots)]

    def take(self, depth: int, places: Sequence[int], outputs: Outputs) -> None:
        """The children of the nodes at `depth`."""
        candidates = np.asarray(outputs[CANDIDATES])
        tokens = candidates if self.trees._d2t is None else self.trees._d2t[candidates]
        level = self.trees._levels[depth]
        for column, (_, children, ranks) in enumerate(level):
            self.tokens[:, children] = tokens[:, column, ranks]
        fresh = [child for _, children, _ in level for child in children]
        for place in places:
            self.is_there[place, fresh] = True
        if self.dists is not None:
            width = max(len(children) for _, children, _ in level)
            draws = self.batch.sibling_uniforms(depth + 1, width).tolist()
            dists = np.asarray(outputs[NODE_PROBS])
            for place in places:
                self._draw(place, level, dists[place], draws[place])
        if self.trees._chains is not None:
            sure = np.asarray(outputs[CANDIDATE_PROBS])[:, 0, 0].tolist()
            for place in places:
                if self.is_there[place, depth + 1]:
                    share = self._share(place, depth + 1, int(tokens[place, 0, 0]))
                    self.trees._chains.add(place, sure[place] * share)

    def _share(self, place: int, node: int, best: int) -> float:
        """The draft's probability of a drawn token over that of its likeliest, both at temperature 1."""
        assert self.dists is not None
        probs = self.dists[place, node]
        prob, most = float(probs[self.tokens[place, node]]), float(probs[best])
        # An engine that breaks ties in another way than the warp may name a likeliest token that the warp cut off.
        return (prob / most) ** self.batch.slots[place].sampling.temperature if most > prob else 1.0

    def _draw(
        self, place: int, level: Sequence[tuple[int, list[int], list[int]]], dists: Floats, draws: Sequence[float]
    ) -> None:
        """Replace the candidates of one slot by draws; a greedy slot keeps them, each under a probs of its own."""
        assert self.dists is not None
        is_greedy = self.batch.slots[place].sampling.is_greedy
        d2t = self.trees._d2t
        for column, (node, children, _) in enumerate(level):
            if not self.is_there[place, node]:
                self.is_there[place, children] = False
                continue
            rows = self.dists[place, children[0] : children[-1] + 1]
            if is_greedy:
                rows[...] = 0
                rows[np.arange(len(children)), self.tokens[place, children]] = 1
                continue
            drawn = rows if d2t is None else np.empty((len(children), len(d2t)), dtype=np.float32)
            tokens = draw_siblings(dists[column], draws[: len(children)], drawn)
            if d2t is not None:
                rows[...] = 0
                rows[:, d2t] = drawn
            self.tokens[place, children[: len(tokens)]] = tokens if d2t is None else d2t[tokens]
            self.is_there[place, children[len(tokens) :]] = False

    def tree(self) -> tuple[TokenTree, list[list[int]]]:
        """What is scored, and for each slot the shape's node that each of its nodes is."""
        shape, batch = self.trees.shape, len(self.tokens)
        if shape.is_chain:
            return self._chain()
        if self.is_there.all():
            everything = list(range(1 + shape.num_drafts))
            kept = [everything] * batch
            parents, num_nodes = np.tile(shape.parents(), (batch, 1)), np.full(batch, len(everything), dtype=np.int64)
            return TokenTree(self.tokens, parents, num_nodes, self.dists), kept
        kept = [np.flatnonzero(row).tolist() for row in self.is_there]
        nodes = max(map(len, kept))
        tokens, parents = np.zeros((batch, nodes), dtype=np.int64), np.full((batch, nodes), -1, dtype=np.int64)
        dists = None if self.dists is None else np.zeros((batch, nodes, self.dists.shape[2]), dtype=np.float32)
        for place, chosen in enumerate(kept):
            at = {node: number for number, node in enumerate(chosen)}
            tokens[place, : len(chosen)] = self.tokens[place, chosen]
            parents[place, 1 : len(chosen)] = [at[self.trees._parents[node]] for node in chosen[1:]]
            if dists is not None and self.dists is not None:
                dists[place, : len(chosen)] = self.dists[place, chosen]
        num_nodes = np.array([len(chosen) for chosen in kept], dtype=np.int64)
        return TokenTree(tokens, parents, num_nodes, dists), kept

    def _chain(self) -> tuple[TokenTree, list[list[int]]]:
        num_nodes = self.is_there.sum(axis=1)
        nodes = int(num_nodes.max())
        tokens = np.where(self.is_there, self.tokens, 0)[:, :nodes]
        dists = None if self.dists is None else self.dists[:, :nodes]
        is_full = int(num_nodes.min()) == nodes
        return TokenTree.chain(tokens, None if is_full else num_nodes, dists), [list(range(n)) for n in num_nodes]
