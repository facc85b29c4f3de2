# SPDX-License-Identifier: Apache-2.0
"""Sliding cache rows against caches that keep all rows: the same numbers, whatever is drafted, refused, cut or moved.

The draft here computes in whole numbers, so that sums have the same bits in any order of rows.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.core.specs import (
    CANDIDATES,
    FEATURE_NODES,
    FEATURES,
    LENGTHS,
    NEXT_FEATURES,
    SCORED_NODES,
    TOKENS,
    TREE_MASK,
)
from speccompile.core.tree import Verdict
from speccompile.drafting.acceptance import DraftState
from speccompile.drafting.feature_drafts import FeatureCache
from speccompile.drafting.mask_drafts import MaskFeatureCache
from speccompile.drafting.sliding_rows import GrowingRows, SlidingRows, rows_of_slot, rows_of_step
from speccompile.drafting.tree import DraftLayout, make_expansion
from speccompile.graph_kinds.features import FIRST_POSITIONS, FeatureDims, feature_draft_spec
from speccompile.ops.cached_attention import visible_rows

SLOTS, MOST, MAX_SEQ, VOCAB, MASK = 3, 5, 150, 50, 49
PRIME = 10_007  # of all numbers: they stay whole in float32, and their products in int64


def padded(rows):
    """Returns lists of different lengths as an array."""
    made = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for slot, row in enumerate(rows):
        made[slot, : len(row)] = row
    return made


class WholeDraft:
    """An engine over a draft of some layers that computes modulo a prime: see `speccompile.core.protocols.Engine`.

    K and V of a row are a number and the position at which it was written, as a rotation would have it.
    """

    def __init__(self, windows, max_rows):
        dims = FeatureDims("whole", VOCAB, 1, len(windows), 1, 1, 1, MAX_SEQ)
        self.spec = feature_draft_spec("draft", dims, 4, False, MAX_SEQ, windows)
        self.windows, self.max_slots, self.max_rows = windows, SLOTS, max_rows
        self.caches = np.full((len(windows), SLOTS, max_rows, 2), -1, dtype=np.int64)

    def run(self, feeds, first_slot=0):
        tokens, lengths = feeds[TOKENS], feeds[LENGTHS]
        batch, nodes = tokens.shape
        assert first_slot + batch <= SLOTS and (lengths >= 0).all() and lengths.max() + nodes <= self.max_rows
        mask = feeds.get(TREE_MASK, np.tril(np.ones((batch, nodes, nodes), bool)))
        roots = lengths + feeds.get(FIRST_POSITIONS, np.zeros(batch, np.int64))
        positions = roots[:, None] + mask.sum(axis=2) - 1
        assert positions.max() < MAX_SEQ
        picked = feeds[FEATURE_NODES]
        read = np.take_along_axis(np.asarray(feeds[FEATURES]).astype(np.int64)[..., 0], np.maximum(picked, 0), 1)
        x = (np.where(picked < 0, 77, read) * 31 + tokens * 7 + 3) % PRIME
        for cache, window in zip(self.caches, self.windows, strict=True):
            seen = visible_rows(lengths, mask, self.max_rows, window)
            for slot in range(batch):
                held = cache[first_slot + slot]
                held[lengths[slot] : lengths[slot] + nodes] = np.stack((x[slot], positions[slot]), -1)
                apart = positions[slot][:, None] - held[:, 1]
                x[slot] = (x[slot] * 13 + (seen[slot] * (held[:, 0] * (5 + apart) + 11)).sum(axis=1)) % PRIME
        own = np.concatenate((read[:, :1], x), 1)[..., None].astype(np.float32)
        scored = feeds.get(SCORED_NODES, np.broadcast_to(np.arange(nodes), (batch, nodes)))
        return {NEXT_FEATURES: own, CANDIDATES: np.take_along_axis(x, scored, 1)[..., None]}

    def move_slot(self, source, dest, rows=None):
        self.caches[:, dest, :rows] = self.caches[:, source, :rows]

    def swap_slots(self, first, second, rows):
        self.caches[:, [first, second], :rows] = self.caches[:, [second, first], :rows]

    def slide_slot(self, slot, first, num):
        assert first >= 0 and first + num <= self.max_rows
        self.caches[:, slot, :num] = self.caches[:, slot, first : first + num].copy()


def make_sequence(tokens):
    return SimpleNamespace(tokens=list(tokens), draft_state=DraftState(None), has_draft=True, max_drafts=MOST - 1)


class Pair:
    """One script on a cache that slides and on one that keeps all rows.

    Args:
        windows: of each layer.
        num_masks: drafts of a run from masks; 0: trees are expanded.
        spare: rows that the sliding cache has more than it needs; below 0: a fault.
    """

    def __init__(self, windows, num_masks=0, spare=0):
        all_rows = MAX_SEQ + MOST
        rows = max(windows) - 1 + rows_of_step(MOST) + spare
        self.windows, self.scorers, self.engines = windows, [], [WholeDraft(windows, num) for num in (rows, all_rows)]
        for engine in self.engines:
            given = (engine, lambda outputs: outputs["states"], ["states"], MAX_SEQ, MOST)
            if num_masks:
                engine.spec = replace(engine.spec, mask_token=MASK)
            self.scorers.append(MaskFeatureCache(*given, num_masks) if num_masks else FeatureCache(*given))
        self.sliding, self.whole = (scorer.rows for scorer in self.scorers)
        assert isinstance(self.sliding, SlidingRows) and type(self.whole) is GrowingRows
        self.rng, self.num_compared, self.num_expanded, self.num_chained = np.random.default_rng(3), 0, 0, 0
        self.sequences = [None] * SLOTS

    def each(self, call):
        """Returns what a call gives for both scorers, with sequences of their own."""
        return [call(scorer, number) for number, scorer in enumerate(self.scorers)]

    def equal(self, outputs, slots):
        first, second = (np.asarray(held[CANDIDATES])[slots] for held in outputs)
        assert np.array_equal(first, second)
        self.num_compared += first.size

    def states(self, tokens, start, num):
        """Returns the target's states of positions: numbers that depend on all tokens up to each."""
        sums = np.cumsum(np.arange(1, len(tokens) + 1) * (np.asarray(tokens) + 1)) % PRIME
        return sums[start : start + num].astype(np.float32)[None, :, None]

    def open(self, slot, tokens, source=None, num_rows=0):
        """Reads a prompt in a slot, after `num_rows` rows of another slot where there is one; chunk by chunk."""
        pair = [make_sequence(tokens) for _ in range(2)]
        self.sequences[slot] = pair
        if source is None:
            self.each(lambda scorer, number: scorer.start(slot))
            starts = [0, 0]
        else:
            self.each(lambda scorer, number: source != slot and scorer.rows.copy(source, slot, num_rows))
            starts = self.each(lambda scorer, number: scorer.resume(slot, pair[number], num_rows))
            assert starts[0] <= starts[1]
        size = int(self.rng.integers(3, 40))
        for number, scorer in enumerate(self.scorers):
            for start in range(starts[number], len(tokens) - 1, size):
                num = min(size, len(tokens) - 1 - start)
                chunk = np.array([tokens[start : start + num]])
                scorer.prefill(slot, pair[number], chunk, start, {"states": self.states(tokens, start, num)})
        return starts

    def batch(self, number, num):
        return SimpleNamespace(sequences=[pair[number] for pair in self.sequences[:num]])

    def step(self, num, drafts=True):
        """A round of `num` slots: a draft, trees of random shapes, and a random verdict."""
        trees = [SimpleNamespace(tokens=[pair[0].tokens[-1]], parents=[-1]) for pair in self.sequences[:num]]
        if drafts:
            slots = [*range(num)]
            outputs = self.each(lambda scorer, number: scorer.begin(self.batch(number, num), slots, {}))
            self.equal(outputs, slots)
            if isinstance(self.scorers[0], MaskFeatureCache):
                for depth in range(1, min(scorer.num_drafts for scorer in self.scorers)):
                    self.equal([scorer._depths.after(depth, 1) for scorer in self.scorers], slots)
                for tree in trees:
                    tree.tokens += draw(self.rng, 3)
                    tree.parents += [0, 1, 2]
            else:
                self.expand(num, trees)
        self.each(lambda scorer, number: scorer.flush())  # the target is about to run
        paths = [self.accepted(tree) for tree in trees]
        depth = max(map(len, paths))
        path = np.array([[*row, *[-1] * (depth - len(row))] for row in paths])
        nums = np.array([len(row) - 1 for row in paths])
        following = self.rng.integers(0, MASK, num)
        verdict = Verdict(path, nums, following)
        nodes = max(len(tree.tokens) for tree in trees)
        seen = np.zeros((num, nodes, 1), np.float32)
        for slot, (tree, row) in enumerate(zip(trees, paths, strict=True)):
            known = self.sequences[slot][0].tokens
            text = [*known, *(tree.tokens[node] for node in row[1:])]
            seen[slot, row, 0] = self.states(text, len(known) - 1, len(row))[0, :, 0]
        for number, scorer in enumerate(self.scorers):
            act = scorer.commit if drafts else lambda batch, kept, *rest, scorer=scorer: scorer.skip(batch, *rest)
            act(self.batch(number, num), nums.tolist(), verdict, {"states": seen})
            for slot, (tree, row) in enumerate(zip(trees, paths, strict=True)):
                new = [*(tree.tokens[node] for node in row[1:]), int(following[slot])]
                self.sequences[slot][number].tokens.extend(new)

    def expand(self, num, trees):
        """Expands trees up to the depth that an expansion can hold; some slots take no part."""
        layouts = [DraftLayout(num, MOST) for _ in range(2)]
        frontiers = [[0] for _ in trees]
        for depth in range(1, MOST):
            for slot, tree in enumerate(trees):
                children = []
                room = MAX_SEQ - len(self.sequences[slot][0].tokens) - depth
                for node in frontiers[slot] if room > 0 else ():
                    for _ in range(self.rng.choice((1, 1, 2, 3))):
                        tree.tokens.append(int(self.rng.integers(0, MASK)))
                        tree.parents.append(node)
                        children.append(len(tree.tokens) - 1)
                size = self.rng.integers(0, 3) if self.rng.random() < 0.2 else 2 if self.rng.random() < 0.5 else 1
                frontiers[slot] = [int(i) for i in self.rng.permutation(children)[:size]]
            if not any(frontiers):
                return
            tokens, parents = (padded([getattr(tree, name) for tree in trees]) for name in ("tokens", "parents"))
            made = [make_expansion(depth, tokens, parents, frontiers, layout, {}) for layout in layouts]
            level, scored = made[0]
            frontiers = [[node for node in row if node >= 0] for row in scored.tolist()]
            outputs = self.each(
                lambda scorer, number, made=made: scorer.expand(self.batch(number, num), made[number][0])
            )
            for slot, taken in enumerate(frontiers):
                if taken:
                    self.equal([{CANDIDATES: held[CANDIDATES][:, : len(taken)]} for held in outputs], [slot])
            self.num_expanded += level.tokens.shape[1] > 1
            self.num_chained += max(level.num_in_place) > 0

    def accepted(self, tree):
        """Returns a random path from the root."""
        path = [0]
        while (children := [i for i, parent in enumerate(tree.parents) if parent == path[-1]]) and len(path) < MOST:
            if self.rng.random() < 0.4:
                break
            path.append(int(self.rng.choice(children)))
        return path


def draw(rng, num):
    return [int(token) for token in rng.integers(0, MASK, num)]


def run_script(pair):
    """Prompts longer than the cache and shorter than a window, ragged rounds to the last row, moves, cut prefixes."""
    rng = np.random.default_rng(5)
    prompts = [draw(rng, num) for num in (70, 2, 23)]
    for slot, prompt in enumerate(prompts):
        pair.open(slot, prompt)
    for round_ in range(30):
        pair.step(3 if round_ % 4 else 2, drafts=round_ % 5 != 3)
        if round_ == 9:
            pair.each(lambda scorer, number: scorer.rows.swap(0, 2))
            pair.sequences[0], pair.sequences[2] = pair.sequences[2], pair.sequences[0]
        if round_ == 14:  # another text begins as one that goes on: the rows are copied, in part long gone
            pair.open(1, [*pair.sequences[2][0].tokens[:60], *draw(rng, 12)], source=2, num_rows=60)
        if round_ == 20:  # nothing is drafted for longer than the cache has rows
            for _ in range(12):
                pair.step(3, drafts=False)
        if max(len(held[0].tokens) for held in pair.sequences) > MAX_SEQ - 3 * MOST:
            break
    known = pair.sequences[2][0].tokens
    num = pair.sliding.lengths[2] - 12  # rows before it have slid out, so that some are read again
    starts = pair.open(2, [*known[:num], 7], source=2, num_rows=num)
    assert starts == [num - 1 - len(pair.windows) * (max(pair.windows) - 1), num - 1]
    pair.step(3)


@pytest.mark.parametrize("windows", [(4,), (9,), (1,), (3, 6)])
def test_no_number_differs_from_those_of_a_cache_that_keeps_all_rows(windows):
    pair = Pair(windows)
    run_script(pair)
    assert pair.num_compared > 150 and pair.num_expanded > 20 and pair.num_chained > 20
    assert pair.sliding.firsts[2] > 30 and pair.whole.lengths == pair.sliding.lengths


@pytest.mark.parametrize("windows", [(4,), (3, 6)])
def test_masks_read_what_they_read_in_a_cache_that_keeps_all_rows(windows):
    pair = Pair(windows, num_masks=4)
    run_script(pair)
    assert pair.num_compared > 80 and pair.sliding.firsts[2] > 30


@pytest.mark.mutant
def test_planted_faults_are_noticed(monkeypatch):
    windows = (4, 4)

    def is_noticed(spare=-5):
        try:
            run_script(Pair(windows, spare=spare))
        except AssertionError:
            return True
        return False

    # The longest step of this script leaves five rows of those that any step could need: one row fewer is too short.
    assert not is_noticed() and is_noticed(spare=-6)
    faults = {
        "_num_seen": lambda rows: rows._num_seen - 1,  # a window one row too short is kept
        "_reach": lambda rows: rows._num_seen,  # too few rows are read again for two layers
    }
    for name, fault in faults.items():
        made = SlidingRows.__init__

        def init(rows, *given, made=made, name=name, fault=fault):
            made(rows, *given)
            setattr(rows, name, fault(rows))

        with monkeypatch.context() as patch:
            patch.setattr(SlidingRows, "__init__", init)
            assert is_noticed(), name
    methods = {
        # positions are taken for rows, so that rotations begin anew when rows slide
        "feeds": lambda rows, starts, first=0: {LENGTHS: np.array(starts) - rows.firsts[first : first + len(starts)]},
        # what is cut off is taken to be there
        "cut": lambda rows, slot, num: GrowingRows.cut(rows, slot, max(num, rows.firsts[slot])),
        # a prefix is copied by its number of rows, wherever they are
        "copy": lambda rows, source, dest, num: GrowingRows.copy(rows, source, dest, num),
    }
    for name, fault in methods.items():
        with monkeypatch.context() as patch:
            patch.setattr(SlidingRows, name, fault)
            assert is_noticed(), name

    def keeps_drafts(rows, slot, num):  # rows of the last drafts, which were refused, stay in place of older ones
        rows.lengths[slot] += 2
        slide(rows, slot, num)
        rows.lengths[slot] -= 2

    slide = SlidingRows.make_room
    with monkeypatch.context() as patch:
        patch.setattr(SlidingRows, "make_room", keeps_drafts)
        assert is_noticed()


def test_a_size_holds_windows_prompts_and_steps():
    dims = FeatureDims("whole", VOCAB, 1, 1, 1, 1, 1, MAX_SEQ)
    spec = feature_draft_spec("draft", dims, 4, False, 8192, [256])
    assert rows_of_slot(spec, 8192, 17, slides=True) == 512 and rows_of_slot(spec, 8192, 17, slides=False) == 8209
    assert rows_of_slot(spec, 300, 17, slides=True) == 317  # all rows are fewer
    assert spec.window == 256 and spec.input(FIRST_POSITIONS).dims == ("batch",)
    for windows in ((), (0,), (256, 0), (8192,)):  # of which a layer sees all rows
        plain = feature_draft_spec("draft", dims, 4, False, 8192, windows)
        assert plain.window == 0 and FIRST_POSITIONS not in [t.name for t in plain.inputs]
