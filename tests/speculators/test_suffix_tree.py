# SPDX-License-Identifier: Apache-2.0
"""The suffix tree against a twin that counts every run by scanning, and wrong trees that the twin must notice."""

import inspect
import random
import tracemalloc
from collections import Counter

import pytest

from speccompile.speculators.suffix import tree as module
from speccompile.speculators.suffix.tree import NODE_BYTES, SuffixTree


class Twin:
    """The definition, by scanning all sequences. A token is (sequence, position); `order` has them as they came."""

    def __init__(self, depth):
        self.depth, self.texts, self.order, self.first = depth, [], [], 0

    def open(self):
        self.texts.append([])
        return len(self.texts) - 1

    def append(self, number, token):
        self.order.append((number, len(self.texts[number])))
        self.texts[number].append(token)

    def starts(self, run):
        """Where a run begins, the first that came before the others; forgotten ones are left out."""
        run, size = list(run), len(run)
        return [(p, at) for p, at in self.order[self.first :] if self.texts[p][at : at + size] == run]

    def followers(self, run):
        """[(share, latest start, token)] of what followed a run, the most frequent first, of equals the latest."""
        seen = self.starts(run)
        after = [(self.texts[p][at + len(run)], (p, at)) for p, at in seen if at + len(run) < len(self.texts[p])]
        counts, latest = Counter(token for token, _ in after), {}
        for token, start in after:
            latest[token] = self.order.index(start)
        rows = sorted(((n, latest[token], token) for token, n in counts.items()), reverse=True)
        return [(n / len(after), token) for n, _, token in rows]

    def match(self, number):
        text = self.texts[number]
        # A match begins in the window as well.
        known = sum(p == number for p, _ in self.order[self.first :])
        lengths = range(min(self.depth - 1, known), 0, -1)
        return next((n for n in lengths if self.followers(text[-n:])), 0)

    def after(self, run, path, where, number):
        """What follows a path that ends with `run`: rows (share, token, run of the path with it, where it is).

        Where the only occurrence reaches the end of its own sequence, what was drafted so far comes after it.
        """
        if where is not None:
            p, at = where
            if p == number and at >= len(self.texts[p]):
                return [(1.0, path[at], None, (p, at + 1))]
            text = self.texts[p]
            return [(1.0, text[at], None, (p, at + 1))] if at < len(text) else []
        if len(run) == self.depth:
            run = path[-(self.depth // 2) :]
        rows = []
        for share, token in self.followers(run):
            longer = [*run, token]
            seen = self.starts(longer)
            is_once = len(seen) == 1
            there = (seen[0][0], seen[0][1] + len(longer)) if is_once else None
            rows.append((share, token, None if is_once else longer, there))
        return rows

    def chain(self, number, num, least):
        text, size = self.texts[number], self.match(number)
        drafts, run, where, prob = [], text[-size:], None, 1.0
        while size and len(drafts) < num:
            rows = self.after(run, [*text, *(token for token, _ in drafts)], where, number)
            if not rows:
                break
            share, token, run, where = rows[0]
            prob *= share
            if prob < least:
                break
            drafts.append((token, share))
        return drafts

    def branches(self, number, num, most_depth, least):
        """All paths of at least that probability, the likeliest first, cut to `num`: {path: share}."""
        text, size, found = self.texts[number], self.match(number), []
        left = [((), 1.0, text[-size:], None)] if size else []
        while left:
            path, prob, run, where = left.pop()
            for share, token, longer, there in self.after(run, [*text, *path], where, number):
                if prob * share >= least and len(path) < most_depth:
                    found.append((prob * share, (*path, token), share))
                    left.append(((*path, token), prob * share, longer, there))
        return found


def runs_of(texts, depth):
    return {tuple(t[i : i + n]) for t in texts for i in range(len(t)) for n in range(1, min(depth, len(t) - i) + 1)}


def streams(rng, num_tokens):
    """Random tokens, some of them copied from before, as texts repeat themselves."""
    alphabet, text = rng.randint(2, 4), []
    while len(text) < num_tokens:
        if text and rng.random() < 0.3:
            at = rng.randrange(len(text))
            text += text[at : at + rng.randint(1, 9)]
        else:
            text.append(rng.randrange(alphabet))
    return text[:num_tokens]


def check(made, twin, cursors, twins, is_full):
    """Compares all that can be asked of a tree with its twin."""
    if is_full:
        twin.first = made.num_forgotten
        for run in runs_of(twin.texts, twin.depth):
            assert made.count(run) == len(twin.starts(run)), run
    for cursor, number in zip(cursors, twins, strict=True):
        text = twin.texts[number]
        assert made.match(cursor) == twin.match(number)
        drafts, probs = made.chain(cursor, text, 11, 0.1)
        assert list(zip(drafts, probs, strict=True)) == twin.chain(number, 11, 0.1)
        found = twin.branches(number, 9, 5, 0.1)
        tokens, parents, shares = made.branches(cursor, text, 9, 5, 0.1)
        paths = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        known = {path: (prob, share) for prob, path, share in found}
        assert [known[path][1] for path in paths] == pytest.approx(shares)
        probs = [known[path][0] for path in paths]
        assert len(paths) == len(set(paths)) == min(9, len(found))
        assert probs == pytest.approx(sorted((row[0] for row in found), reverse=True)[:9])


def compare(tree_class, seed, num_texts=1, max_nodes=None, num_tokens=70):
    """Feeds one random stream to a tree and its twin, which must agree after every few tokens."""
    rng = random.Random(seed)
    depth = rng.randint(3, 7)
    made, twin = tree_class(depth, 10**6), Twin(depth)
    if max_nodes:
        made.max_nodes = max_nodes
    cursors, twins = zip(*[(made.open(), twin.open()) for _ in range(num_texts)], strict=True)
    texts = [streams(rng, num_tokens) for _ in range(num_texts)]
    for step in range(num_tokens * num_texts):
        at = rng.randrange(num_texts)
        if len(twin.texts[at]) == num_tokens:
            continue
        token = texts[at][len(twin.texts[at])]
        made.append(cursors[at], token)
        twin.append(twins[at], token)
        twin.first = made.num_forgotten
        if step % 7 == 0:
            check(made, twin, cursors, twins, step % 35 == 0)
    check(made, twin, cursors, twins, True)
    return made


@pytest.mark.parametrize("seed", range(12))
def test_counts_and_drafts_are_those_of_the_twin(seed):
    compare(SuffixTree, seed)


@pytest.mark.parametrize("seed", range(8))
def test_a_tree_that_forgets_has_the_runs_that_begin_in_its_window(seed):
    made = compare(SuffixTree, seed, max_nodes=12, num_tokens=90)
    assert made.num_forgotten > 0 and made.num_nodes <= 12


@pytest.mark.parametrize("seed", range(8))
def test_a_tree_of_several_sequences_counts_all_of_them(seed):
    compare(SuffixTree, seed, num_texts=3, num_tokens=30)
    compare(SuffixTree, seed, num_texts=3, num_tokens=40, max_nodes=12)


def test_a_sequence_that_is_gone_stays_counted():
    made = SuffixTree(4, 10**6)
    first = made.open()
    for token in (1, 2, 3):
        made.append(first, token)
    del first
    second = made.open()
    for token in (1, 2):
        made.append(second, token)
    assert made.chain(second, [1, 2], 5, 0.1) == ([3], [1.0])


@pytest.mark.parametrize("kind", ["new", "repeated", "one token"])
def test_memory_is_bounded(kind):
    rng, most = random.Random(0), 200_000
    block = [rng.randrange(5000) for _ in range(100)]
    stream = {"new": lambda i: rng.randrange(5000), "repeated": lambda i: block[i % 100], "one token": lambda i: 7}[
        kind
    ]
    tracemalloc.start()
    before, made = tracemalloc.get_traced_memory()[0], SuffixTree(8, most)
    cursor = made.open()
    for i in range(2_500):
        made.append(cursor, stream(i))
    used, peak = (size - before for size in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    assert made.num_nodes <= made.max_nodes == most // NODE_BYTES
    assert used <= peak <= most
    assert kind == "one token" or made.num_forgotten > 1000


MUTANTS = {
    "the match is one token short": ("length = len(cursor.active) - 1\n", "length = max(len(cursor.active) - 2, 0)\n"),
    "a match may end where nothing follows": ("or not self._totals[cursor", "or False and self._totals[cursor"),
    "a match may begin before the window": ("(cursor.recent[-length] < self._first or", "(False or"),
    "the end of a forgotten run stays active": ("recent[1 - len(active)] < self._first", "False"),
    "the count of the parent grows": ("counts[child] = count + 1", "counts[node] = counts[child] + 1"),
    "the first occurrence is not counted again": ("self._totals[leaf] = 1", "self._totals[leaf] = 0"),
    "children are not put in order": ("counts[kids[rank - 1]] <= count", "counts[kids[rank - 1]] < 0"),
    "the first of equals wins": ("found.sort(reverse=True)", "found.sort(key=lambda row: (-row[0], row[1]))"),
    "the latest occurrence is not kept": ("if start > self._starts[child]:", "if False:"),
    "runs are one token too long": ("self.depth - 1\n", "self.depth\n"),
    "its nodes stay active": ("del cursor.active[size:]", "pass"),
    "forgotten runs keep their followers": ("self._totals[node] -= 1", "pass"),
    "forgotten children are not put in order": ("self._swap(kids, rank, bisect_right", "(kids, rank, bisect_right"),
    "the whole run stands for its second half": ("node, length = 0, self.depth // 2", "node, length = 0, 1"),
    "the loop of a chain is longer": ("node, length = -len(drafts), -1", "node, length = -len(drafts) - 1, -1"),
    "the loop of a branch is longer": ("node, size = -len(path), -1", "node, size = -len(path) - 1, -1"),
    "paths are not cut by probability": ("if prob < least:", "if False:"),
    "the other sequence does not learn": ("cursor.active.append(leaf)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_trees_are_noticed(name):
    right, wrong = MUTANTS[name]
    source = inspect.getsource(module)
    assert source.count(right) == 1
    made = {}
    exec(compile(source.replace(right, wrong), "mutant", "exec"), made)
    with pytest.raises((AssertionError, KeyError, IndexError, TypeError, OverflowError)):  # noqa: PT012
        for seed in range(12):
            compare(made["SuffixTree"], seed)
            compare(made["SuffixTree"], seed, max_nodes=12, num_tokens=90)
            compare(made["SuffixTree"], seed, num_texts=3, num_tokens=30)
            compare(made["SuffixTree"], seed, num_texts=3, num_tokens=40, max_nodes=12)
