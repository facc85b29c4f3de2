# SPDX-License-Identifier: Apache-2.0
"""Draft trees of one shape with a scorer: the most probable candidates, or independent draws.

In sequences that sample the former are those to win the target's race (`drafting.race`). A drawn token must not be left
out because of its value. A fixed shape leaves out none, and a chain may end after any token, see `drawn_length`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.protocols import Batch, Outputs, StepTimes
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES, NODE_PROBS
from speccompile.core.tree import Floats, Ints, TokenTree, Verdict
from speccompile.core.tree_shape import TreeShape
from speccompile.drafting.acceptance import own_path
from speccompile.drafting.drawn_length import DrawnChains, DrawnLength
from speccompile.drafting.grammars import Paths, draft_warp, has_grammars, paths_after, refuse, restrict
from speccompile.drafting.proposer import Scorer
from speccompile.drafting.race import raced_candidates
from speccompile.drafting.tree import DraftLayout, DraftTrees, Expansion, make_expansion

Level = list[tuple[int, list[int], list[int]]]  # nodes of a depth, each with its children and their ranks


class StaticTrees:
    """Makes drafts of one shape for a batch, as deep as each sequence may go.

    Args:
        shape: of the tree; one expansion feeds at most `shape.num_drafts` nodes.
        may_draw: draw drafts for sequences that sample; otherwise they are the most probable candidates.
        length: decides where a drawn chain ends; None: drafts have the whole shape.
    """

    def __init__(
        self, scorer: Scorer, shape: TreeShape, *, may_draw: bool, vocab_size: int, length: DrawnLength | None = None
    ) -> None:
        self._length = length if shape.is_chain and may_draw else None
        self.scorer, self.shape, self.may_draw = scorer, shape, may_draw
        self.parents, ranks = shape.parents(), shape.ranks().tolist()
        self.levels: list[Level] = []  # by depth
        for depth in range(shape.max_depth):
            level = []
            for node in shape.level(depth):
                children = [c for c in shape.level(depth + 1) if self.parents[c] == node]
                if children:
                    level.append((node, children, [ranks[c] for c in children]))
            self.levels.append(level)
        self._plans = self._plan_levels()
        self._rows: DraftLayout | None = None
        self._kept: list[list[int]] = []
        self._fed: list[int] = []  # by slot, the greatest depth that was read
        self.chains: DrawnChains | None = None
        # [largest batch so far, 1 + num_drafts, vocab] float32, reused.
        self.probs: Floats = np.zeros((0, 1 + shape.num_drafts, vocab_size), dtype=np.float32)

    def _plan_levels(self) -> list[tuple[Expansion, DraftLayout]]:
        num_drafts = self.shape.num_drafts
        parents, rows, plans = self.parents[None], DraftLayout(1, num_drafts), []
        for depth, nodes in enumerate(self.levels[1:], start=1):
            level, _ = make_expansion(
                depth, np.zeros_like(parents), parents, [[node for node, _, _ in nodes]], rows, {}
            )
            held = DraftLayout(1, num_drafts)
            held.chains, held.columns = [list(rows.chains[0])], [list(rows.columns[0])]
            plans.append((level, held))
        return plans

    def new_estimate(self) -> None:
        """Returns None: nothing is estimated."""

    def observe(self, num_slots: int, num_nodes: int, times: StepTimes) -> None: ...

    def propose(self, batch: Batch) -> TokenTree:
        """Returns trees; a sequence that cannot draft has its root alone."""
        sequences, self._rows, self._kept, self._fed = batch.sequences, None, [], [0] * len(batch.sequences)
        roots = np.array([sequence.tokens[-1] for sequence in sequences], dtype=np.int64)
        rooms = [
            self.scorer.room(slot, sequence) if sequence.max_drafts > 0 else -1
            for slot, sequence in enumerate(sequences)
        ]
        able = [slot for slot, room in enumerate(rooms) if room >= 0]
        is_drawn = self.may_draw and batch.may_draw
        self.chains = self._length.begin(batch) if self._length is not None and is_drawn else None
        if self.chains is not None:
            able = [slot for slot in able if self.chains.goes_on(slot)]
        if not able:
            return TokenTree.roots(roots)
        limits = [min(sequence.max_drafts, room + 1) for sequence, room in zip(sequences, rooms, strict=True)]
        drafts = _Drafts(self, batch, roots, is_drawn)
        drafts.take(0, able, self.scorer.begin(batch, able, drafts.warp))
        for depth, (plan, held) in enumerate(self._plans, start=1):
            slots = [slot for slot in able if self._fed[slot] == depth - 1 and limits[slot] > depth]
            if self.chains is not None:
                slots = [slot for slot in slots if drafts.exists[slot, depth] and self.chains.goes_on(slot)]
            elif drafts.is_masked:
                nodes = [node for node, _, _ in self.levels[depth]]
                slots = [slot for slot in slots if drafts.exists[slot, nodes].any()]
            if not slots:
                break
            for slot in slots:
                self._fed[slot] = depth
            drafts.take(depth, slots, self.scorer.expand(batch, _for_batch(plan, drafts, slots)))
            self._rows = held
        tree, self._kept = drafts.tree()
        return tree

    def commit(self, batch: Batch, tree: TokenTree, verdict: Verdict) -> list[int]:
        """Returns by slot how many of the accepted drafts have their rows in the draft's cache."""
        if self.chains is not None:
            self.chains.learn(verdict.num_accepted.tolist())
        if self._rows is None:
            return [0] * tree.batch
        rows = []
        for slot, kept in enumerate(self._kept):
            path = own_path(verdict, slot, len(kept))
            num_held = self._rows.num_kept(0, [kept[node] for node in path[1:]])
            rows.append(min(num_held, self._fed[slot]))  # padding of later expansions comes after these
        return rows


def _for_batch(plan: Expansion, drafts: _Drafts, slots: Sequence[int]) -> Expansion:
    tokens, nodes = drafts.trees.tokens, plan.nodes[0]
    batch = len(tokens)
    if batch == 1:
        return replace(plan, tokens=tokens[:, nodes], warp=drafts.warp)
    takes_part = set(slots)
    return Expansion(
        plan.depth,
        tokens[:, nodes],
        np.ascontiguousarray(np.broadcast_to(plan.tree_mask, (batch, len(nodes), len(nodes)))),
        np.ascontiguousarray(np.broadcast_to(plan.scored_nodes, (batch, plan.scored_nodes.shape[1]))),
        list(plan.num_in_place) * batch,
        [nodes if slot in takes_part else () for slot in range(batch)],
        [plan.parents[0] if slot in takes_part else () for slot in range(batch)],
        drafts.warp,
    )


class _Drafts:
    """The drafts of one step under construction; node indices are those of the shape."""

    def __init__(self, maker: StaticTrees, batch: Batch, roots: Ints, is_drawn: bool) -> None:
        self.maker, self.batch = maker, batch
        # To draw from, to race over, or for grammars to choose among all tokens.
        self.is_masked = has_grammars(batch)
        gives_probs = maker.may_draw and (not batch.is_greedy or self.is_masked)
        self.warp: Mapping[str, NDArray[Any]] = draft_warp(batch) if gives_probs else {}
        self.trees = DraftTrees(roots, maker.shape.num_drafts)
        self.trees.parents[:, :-1] = maker.parents
        self.exists = self.trees.paths[:, :-1]  # above 0: the node is there
        self.probs: Floats | None = None  # [batch, nodes, vocab] float32: distribution that each node was drawn from
        if is_drawn:
            if len(roots) > len(maker.probs):
                maker.probs = np.zeros((len(roots), *maker.probs.shape[1:]), dtype=np.float32)
            self.probs = maker.probs[: len(roots)]
            self.firsts = np.tile(np.arange(1 + maker.shape.num_drafts), (len(roots), 1))  # of equal siblings

    def take(self, depth: int, slots: Sequence[int], outputs: Outputs) -> None:
        """Adds the children of the nodes at `depth` in the given slots, from the draft's outputs."""
        level: Level = self.maker.levels[depth]
        paths: Paths = ()
        if self.is_masked:
            nodes = np.full((len(self.exists), len(level)), -1, dtype=np.int64)
            above = [node for node, _, _ in level]
            nodes[slots] = np.where(self.exists[slots][:, above] > 0, above, -1)
            paths = paths_after(self.batch, self.trees, nodes)
            outputs = restrict(self.batch, paths, outputs)
        tokens, sure = np.asarray(outputs[CANDIDATES]), np.asarray(outputs[CANDIDATE_PROBS])
        if self.probs is None:
            tokens, sure = raced_candidates(self.batch, depth + 1, outputs)
        allowed = refuse(self.batch, paths, tokens, np.ones(tokens.shape)) if self.is_masked else None
        for column, (_, children, ranks) in enumerate(level):
            self.trees.tokens[:, children] = np.maximum(tokens[:, column, ranks], 0)  # those refused are fed, unseen
            for slot in slots:
                self.exists[slot, children] = 1
                sequence = self.batch.sequences[slot]
                is_drawn = self.probs is not None and not sequence.sampling.is_greedy
                if allowed is not None and sequence.grammar is not None and not is_drawn:
                    self.exists[slot, children] = allowed[slot, column, ranks]
        if self.probs is not None:
            self._draw(level, depth, slots, np.asarray(outputs[NODE_PROBS]))
        if self.maker.chains is not None:
            for slot in slots:
                if self.exists[slot, depth + 1]:
                    share = self._share(slot, depth + 1, int(tokens[slot, 0, 0]))
                    self.maker.chains.add(slot, float(sure[slot, 0, 0]) * share)

    def _share(self, slot: int, node: int, best: int) -> float:
        """Returns the draft's probability of a drawn token over that of its likeliest, both at temperature 1."""
        assert self.probs is not None
        probs = self.probs[slot, node]
        prob, most = float(probs[self.trees.tokens[slot, node]]), float(probs[best])
        # An engine may break ties in another way than the warp, so that its likeliest token has probability 0 here.
        return (prob / most) ** self.batch.sequences[slot].sampling.temperature if most > prob else 1.0

    def _draw(self, level: Level, depth: int, slots: Sequence[int], node_probs: Floats) -> None:
        """Replaces candidates with draws; a greedy sequence keeps them, with one-hot distributions.

        Equal siblings are one: the first has the children of all, drawn from one distribution.
        """
        assert self.probs is not None
        start, end = level[0][1][0], level[-1][1][-1] + 1
        draws = self.batch.draft_uniforms(depth + 1, end - start)
        for slot in slots:
            rows, firsts = dict[int, Floats](), dict[tuple[int, int], int]()
            for column, (node, children, _) in enumerate(level):
                if self.batch.sequences[slot].sampling.is_greedy:
                    self.probs[slot, children] = 0
                    self.probs[slot, children, self.trees.tokens[slot, children]] = 1
                    continue
                first = int(self.firsts[slot, node])
                row = rows.setdefault(first, node_probs[slot, column])
                sums = np.cumsum(row, dtype=np.float64)
                is_there = bool(self.exists[slot, node]) and sums[-1] > 0  # of a grammar, there may be no token at all
                self.exists[slot, children], self.trees.parents[slot, children] = is_there, first
                if not is_there:
                    self.trees.tokens[slot, children] = 0
                    continue
                self.probs[slot, children] = row * np.float32(1 / sums[-1])
                bounds = draws[slot, np.array(children) - start].astype(np.float64) * sums[-1]
                for child, token in zip(children, np.searchsorted(sums, bounds, side="right").tolist(), strict=True):
                    self.trees.tokens[slot, child] = token
                    self.firsts[slot, child] = firsts.setdefault((first, token), child)

    def tree(self) -> tuple[TokenTree, list[list[int]]]:
        """Returns the tree to score, and for each slot the shape's node index of each of its nodes."""
        exists = self.exists > 0
        if self.maker.shape.is_chain:
            num_nodes = exists.sum(axis=1)
            nodes = int(num_nodes.max())
            tokens = np.where(exists, self.trees.tokens[:, :-1], 0)[:, :nodes]
            probs = None if self.probs is None else self.probs[:, :nodes]
            is_full = int(num_nodes.min()) == nodes
            return TokenTree.chain(tokens, None if is_full else num_nodes, probs), [list(range(n)) for n in num_nodes]
        kept = [np.flatnonzero(row).tolist() for row in exists]
        if exists.all():
            num_nodes = np.full(exists.shape[:1], exists.shape[1], dtype=np.int64)
            tokens, parents = self.trees.tokens[:, :-1].copy(), self.trees.parents[:, :-1].copy()
            return TokenTree(tokens, parents, num_nodes, self.probs), kept
        return self.trees.tree_of(kept, self.probs), kept
