# SPDX-License-Identifier: Apache-2.0
"""Draft trees of one shape with a scorer: the likeliest candidates, or siblings drawn without replacement.

The likeliest are those to win the target's race in sequences that sample (`drafting.race`).

A drawn token must not be left out because of its value, as that would change the output distribution. A fixed shape
leaves out none, and a chain may end after any token, see `drawn_length`. A node whose distribution has fewer tokens
than the shape has children gets fewer children; that depends on the distribution alone, not on what is drawn.
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
from speccompile.drafting.acceptance import own_path
from speccompile.drafting.drawn_length import DrawnChains, DrawnLength
from speccompile.drafting.grammars import Paths, draft_warp, has_grammars, is_allowed, restrict
from speccompile.drafting.proposer import Scorer
from speccompile.drafting.race import raced_candidates
from speccompile.drafting.siblings import draw_siblings
from speccompile.drafting.tree import DraftLayout, Expansion, make_expansion


class StaticTrees:
    """Makes drafts of one shape for a batch, as deep as each sequence may go.

    Args:
        shape: of the tree; one expansion feeds at most `shape.num_drafts` nodes.
        may_sample: draw drafts for sequences that sample; otherwise they are the likeliest candidates.
        length: decides where a drawn chain ends; None: drafts have the whole shape.
    """

    def __init__(
        self,
        scorer: Scorer,
        shape: TreeShape,
        *,
        may_sample: bool,
        vocab_size: int,
        length: DrawnLength | None = None,
    ) -> None:
        self._length = length if shape.is_chain and may_sample else None
        self.scorer, self.shape, self.may_sample, self._vocab = scorer, shape, may_sample, vocab_size
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
        self._fed: list[int] = []  # by slot, the greatest depth that was read
        self._chains: DrawnChains | None = None
        self._probs: dict[int, Floats] = {}  # by batch size: [batch, 1 + num_drafts, vocab] float32, reused

    def _plan_levels(self) -> list[tuple[Expansion, DraftLayout]]:
        num_drafts = self.shape.num_drafts
        parents, rows, plans = self.shape.parents()[None], DraftLayout(1, num_drafts), []
        for depth, nodes in enumerate(self._levels[1:], start=1):
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
        is_drawn = self.may_sample and batch.may_draw
        self._chains = self._length.begin(batch) if self._length is not None and is_drawn else None
        if self._chains is not None:
            able = [slot for slot in able if self._chains.goes_on(slot)]
        if not able:
            return TokenTree.roots(roots)
        limits = [min(sequence.max_drafts, room + 1) for sequence, room in zip(sequences, rooms, strict=True)]
        drafts, is_masked = _Drafts(self, batch, roots, is_drawn), has_grammars(batch)
        drafts.take(0, able, self.scorer.begin(batch, able, drafts.warp))
        for depth, (plan, held) in enumerate(self._plans, start=1):
            slots = [slot for slot in able if self._fed[slot] == depth - 1 and limits[slot] > depth]
            if self._chains is not None:
                slots = [slot for slot in slots if drafts.is_there[slot, depth] and self._chains.goes_on(slot)]
            elif is_masked:
                nodes = [node for node, _, _ in self._levels[depth]]
                slots = [slot for slot in slots if drafts.is_there[slot, nodes].any()]
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
        if self._chains is not None:
            self._chains.learn(verdict.num_accepted.tolist())
        if self._rows is None:
            return [0] * tree.batch
        rows = []
        for slot, kept in enumerate(self._kept):
            path = own_path(verdict, slot, len(kept))
            num_held = self._rows.num_kept(0, [kept[node] for node in path[1:]])
            rows.append(min(num_held, self._fed[slot]))  # padding of later expansions comes after these
        return rows


def _for_batch(plan: Expansion, drafts: _Drafts, slots: Sequence[int]) -> Expansion:
    batch, nodes = len(drafts.tokens), plan.nodes[0]
    if batch == 1:
        return replace(plan, tokens=drafts.tokens[:, nodes], warp=drafts.warp)
    takes_part = set(slots)
    return Expansion(
        plan.depth,
        drafts.tokens[:, nodes],
        np.ascontiguousarray(np.broadcast_to(plan.tree_mask, (batch, len(nodes), len(nodes)))),
        np.ascontiguousarray(np.broadcast_to(plan.scored_nodes, (batch, plan.scored_nodes.shape[1]))),
        list(plan.num_in_place) * batch,
        [nodes if slot in takes_part else () for slot in range(batch)],
        [plan.parents[0] if slot in takes_part else () for slot in range(batch)],
        drafts.warp,
    )


class _Drafts:
    """The drafts of one step under construction; node indices are those of the shape."""

    def __init__(self, trees: StaticTrees, batch: Batch, roots: Ints, is_drawn: bool) -> None:
        self.trees, self.batch = trees, batch
        # To draw from, to race over, or for grammars to choose among all tokens.
        gives_probs = trees.may_sample and (not batch.is_greedy or has_grammars(batch))
        self.warp: Mapping[str, NDArray[Any]] = draft_warp(batch) if gives_probs else {}
        size = 1 + trees.shape.num_drafts
        self.tokens = np.zeros((len(roots), size), dtype=np.int64)
        self.tokens[:, 0] = roots
        self.is_there = np.zeros((len(roots), size), dtype=np.bool_)
        self.is_there[:, 0] = True
        self.probs: Floats | None = None  # [batch, nodes, vocab] float32: distribution that each node was drawn from
        if is_drawn:
            if len(roots) not in trees._probs:
                trees._probs[len(roots)] = np.zeros((len(roots), size, trees._vocab), dtype=np.float32)
            self.probs = trees._probs[len(roots)]

    def take(self, depth: int, slots: Sequence[int], outputs: Outputs) -> None:
        """Adds the children of the nodes at `depth` in the given slots, from the draft's outputs."""
        level = self.trees._levels[depth]
        if has_grammars(self.batch):
            outputs = restrict(self.batch, self._paths(slots, level), outputs)
        tokens, sure = np.asarray(outputs[CANDIDATES]), np.asarray(outputs[CANDIDATE_PROBS])
        if self.probs is None:
            tokens, sure = raced_candidates(self.batch, depth + 1, outputs)
        for column, (_, children, ranks) in enumerate(level):
            self.tokens[:, children] = tokens[:, column, ranks]
        fresh = [child for _, children, _ in level for child in children]
        for slot in slots:
            self.is_there[slot, fresh] = True
            sequence = self.batch.sequences[slot]
            if sequence.grammar is not None and (self.probs is None or sequence.sampling.is_greedy):
                self._leave_out(slot, level)
        if self.probs is not None:
            width = max(len(children) for _, children, _ in level)
            draws = self.batch.sibling_uniforms(depth + 1, width).tolist()
            node_probs = np.asarray(outputs[NODE_PROBS])
            for slot in slots:
                self._draw(slot, level, node_probs[slot], draws[slot])
        if self.trees._chains is not None:
            for slot in slots:
                if self.is_there[slot, depth + 1]:
                    share = self._share(slot, depth + 1, int(tokens[slot, 0, 0]))
                    self.trees._chains.add(slot, float(sure[slot, 0, 0]) * share)

    def _paths(self, slots: Sequence[int], level: Sequence[tuple[int, list[int], list[int]]]) -> Paths:
        takes_part, rows = set(slots), list[list[list[int] | None]]()
        for slot, sequence in enumerate(self.batch.sequences):
            row = list[list[int] | None]()
            for node, _, _ in level if sequence.grammar is not None and slot in takes_part else ():
                path, above = list[int](), node
                while above > 0:
                    path.append(int(self.tokens[slot, above]))
                    above = self.trees._parents[above]
                row.append(path[::-1] if self.is_there[slot, node] else None)
            rows.append(row)
        return rows

    def _leave_out(self, slot: int, level: Sequence[tuple[int, list[int], list[int]]]) -> None:
        [path_row] = self._paths([slot], level)[slot : slot + 1]
        grammar = self.batch.sequences[slot].grammar
        for (_, children, _), path in zip(level, path_row, strict=True):
            for child in children:
                token = int(self.tokens[slot, child])
                self.is_there[slot, child] = is_right = path is not None and is_allowed(grammar, path, token)
                self.tokens[slot, child] = token if is_right else 0

    def _share(self, slot: int, node: int, best: int) -> float:
        """Returns the draft's probability of a drawn token over that of its likeliest, both at temperature 1."""
        assert self.probs is not None
        probs = self.probs[slot, node]
        prob, most = float(probs[self.tokens[slot, node]]), float(probs[best])
        # An engine may break ties in another way than the warp, so that its likeliest token has probability 0 here.
        return (prob / most) ** self.batch.sequences[slot].sampling.temperature if most > prob else 1.0

    def _draw(
        self, slot: int, level: Sequence[tuple[int, list[int], list[int]]], node_probs: Floats, draws: Sequence[float]
    ) -> None:
        """Replaces the candidates of one slot with draws; a greedy sequence keeps them, with one-hot distributions."""
        assert self.probs is not None
        is_greedy = self.batch.sequences[slot].sampling.is_greedy
        for column, (node, children, _) in enumerate(level):
            if not self.is_there[slot, node]:
                self.is_there[slot, children] = False
                continue
            rows = self.probs[slot, children[0] : children[-1] + 1]
            if is_greedy:
                rows[...] = 0
                rows[np.arange(len(children)), self.tokens[slot, children]] = 1
                continue
            tokens = draw_siblings(node_probs[column], draws[: len(children)], rows)
            self.tokens[slot, children[: len(tokens)]] = tokens
            self.tokens[slot, children[len(tokens) :]] = 0  # of a grammar, there may be no token at all
            self.is_there[slot, children[len(tokens) :]] = False

    def tree(self) -> tuple[TokenTree, list[list[int]]]:
        """Returns the tree to score, and for each slot the shape's node index of each of its nodes."""
        shape, batch = self.trees.shape, len(self.tokens)
        if shape.is_chain:
            return self._chain()
        if self.is_there.all():
            everything = list(range(1 + shape.num_drafts))
            kept = [everything] * batch
            parents, num_nodes = np.tile(shape.parents(), (batch, 1)), np.full(batch, len(everything), dtype=np.int64)
            return TokenTree(self.tokens, parents, num_nodes, self.probs), kept
        kept = [np.flatnonzero(row).tolist() for row in self.is_there]
        nodes = max(map(len, kept))
        tokens, parents = np.zeros((batch, nodes), dtype=np.int64), np.full((batch, nodes), -1, dtype=np.int64)
        probs = None if self.probs is None else np.zeros((batch, nodes, self.probs.shape[2]), dtype=np.float32)
        for slot, chosen in enumerate(kept):
            at = {node: number for number, node in enumerate(chosen)}
            tokens[slot, : len(chosen)] = self.tokens[slot, chosen]
            parents[slot, 1 : len(chosen)] = [at[self.trees._parents[node]] for node in chosen[1:]]
            if probs is not None and self.probs is not None:
                probs[slot, : len(chosen)] = self.probs[slot, chosen]
        num_nodes = np.array([len(chosen) for chosen in kept], dtype=np.int64)
        return TokenTree(tokens, parents, num_nodes, probs), kept

    def _chain(self) -> tuple[TokenTree, list[list[int]]]:
        num_nodes = self.is_there.sum(axis=1)
        nodes = int(num_nodes.max())
        tokens = np.where(self.is_there, self.tokens, 0)[:, :nodes]
        probs = None if self.probs is None else self.probs[:, :nodes]
        is_full = int(num_nodes.min()) == nodes
        return TokenTree.chain(tokens, None if is_full else num_nodes, probs), [list(range(n)) for n in num_nodes]
