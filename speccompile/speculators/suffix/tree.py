# SPDX-License-Identifier: Apache-2.0
"""A suffix tree of token sequences: how often each run of at most `depth` tokens occurred, and what followed it.

Only nodes that occurred at least twice have children: of others the sequence itself says what followed, so text that
repeats nothing costs about one node a token. A token adds one to the node of every suffix that occurred before; these
nodes are kept (`Cursor.active`, one on average without repeats, `depth` at most), so nothing is searched. At its bytes'
limit the tree takes out the runs that begin at the oldest token.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush
from weakref import WeakSet

NODE_BYTES = 400  # of a node with its entries in all lists and its share of the tokens; `tracemalloc` found less
TOKEN_BITS = 32
TRIM = 4096  # tokens that are forgotten at once

Follower = tuple[int, float, int, int]  # token, probability given what is before it, and where it leads: node, length


class Cursor:
    """The end of one sequence that a tree reads. While it exists, the sequence can be appended to."""

    __slots__ = ("__weakref__", "active", "last", "recent")

    def __init__(self) -> None:
        self.active = [0]  # by length, the node of the text's suffix: of those that occurred at least twice
        self.recent: list[int] = []  # indices of its latest tokens, at least `depth` of them
        self.last = -1  # index of its last token


class SuffixTree:
    """Counts of the runs of at most `depth` (2 or more) tokens; `max_bytes` keep at least 20 nodes a token of it."""

    def __init__(self, depth: int, max_bytes: int) -> None:
        self.depth, self.max_nodes = depth, max(max_bytes // NODE_BYTES, 20 * depth)
        self._children: dict[int, int] = {}  # node << TOKEN_BITS | token -> child
        # By node; 0 is the root.
        self._counts, self._totals = array("q", [0]), array("q", [0])  # occurrences, and those with a token after them
        self._starts, self._ranks = array("q", [0]), array("q", [0])  # latest occurrence; index among its siblings
        self._tokens = array("q", [0])
        self._kids: list[list[int] | None] = [[]]  # the most frequent first; None: a leaf
        self._unused: list[int] = []
        self._text, self._next = array("q"), array("q")  # by index - base: token, and index of the one after it or -1
        self._base = self._first = (
            0  # index of the first token that is kept, and of the first one whose runs are counted
        )
        self._cursors: WeakSet[Cursor] = WeakSet()

    @property
    def num_nodes(self) -> int:
        return len(self._counts) - 1 - len(self._unused)

    @property
    def num_forgotten(self) -> int:
        return self._first

    def open(self) -> Cursor:
        """Returns the end of a new, empty sequence."""
        cursor = Cursor()
        self._cursors.add(cursor)
        return cursor

    def append(self, cursor: Cursor, token: int) -> None:
        """Appends a token to a sequence."""
        counts, totals, children, kids_of, ranks = (
            *(self._counts, self._totals, self._children),
            *(self._kids, self._ranks),
        )
        index, active, recent = self._base + len(self._text), cursor.active, cursor.recent
        self._text.append(token)
        self._next.append(-1)
        if cursor.last >= self._base:
            self._next[cursor.last - self._base] = index
        # Others may have used up the tree since: what begins before its first token is not counted any more.
        while len(active) > 1 and recent[1 - len(active)] < self._first:
            active.pop()
        cursor.last = index
        recent.append(index)
        if len(recent) > 4 * self.depth:
            del recent[: -self.depth]
        following, most = [0], self.depth - 1
        for length, node in enumerate(active):
            totals[node] += 1
            child = children.get(node << TOKEN_BITS | token)
            start = recent[-1 - length]
            if child is None:
                self._add(node, token, start)
                continue
            count = counts[child]
            if length < most:
                if count == 1:
                    self._branch(child, length + 1)
                following.append(child)
            counts[child] = count + 1
            if start > self._starts[child]:
                self._starts[child] = start
            rank, kids = ranks[child], kids_of[node]
            if rank and kids is not None and counts[kids[rank - 1]] <= count:
                self._swap(kids, rank, bisect_left(kids, -count, 0, rank, key=lambda kid: -counts[kid]))
        cursor.active = following
        while self.num_nodes > self.max_nodes:
            self._forget()

    def _swap(self, kids: list[int], first: int, second: int) -> None:
        kids[first], kids[second] = kids[second], kids[first]
        self._ranks[kids[first]], self._ranks[kids[second]] = first, second

    def _add(self, parent: int, token: int, start: int) -> None:
        """Adds a leaf."""
        kids = self._kids[parent]
        assert kids is not None
        if self._unused:
            node = self._unused.pop()
            self._counts[node], self._totals[node], self._starts[node] = 1, 0, start
            self._ranks[node], self._tokens[node] = len(kids), token
        else:
            node = len(self._counts)
            self._counts.append(1)
            self._totals.append(0)
            self._starts.append(start)
            self._ranks.append(len(kids))
            self._tokens.append(token)
            self._kids.append(None)
        kids.append(node)
        self._children[parent << TOKEN_BITS | token] = node

    def _branch(self, leaf: int, length: int) -> None:
        self._kids[leaf] = []
        end = self._last_of(self._starts[leaf], length)
        after = self._next[end - self._base]
        if after >= 0:
            self._totals[leaf] = 1
            self._add(leaf, self._text[after - self._base], self._starts[leaf])
            return
        for cursor in self._cursors:  # it is the end of another sequence
            if cursor.last == end and len(cursor.active) == length:
                cursor.active.append(leaf)

    def _last_of(self, start: int, length: int) -> int:
        for _ in range(length - 1):
            start = self._next[start - self._base]
        return start

    def _forget(self) -> None:
        """Takes out the runs that begin at the oldest token."""
        index, node = self._first, 0
        self._first += 1
        for length in range(1, self.depth + 1):
            token, kids = self._text[index - self._base], self._kids[node]
            assert kids is not None
            self._totals[node] -= 1
            child = self._children[node << TOKEN_BITS | token]
            count = self._counts[child] = self._counts[child] - 1
            rank = self._ranks[child]
            counts = self._counts
            # The last of those that occurred as often as this one did.
            self._swap(kids, rank, bisect_right(kids, -count - 1, rank + 1, key=lambda kid: -counts[kid]) - 1)
            if count == 0:
                kids.pop()
                del self._children[node << TOKEN_BITS | token]
                self._unused.append(child)
                break
            if self._kids[child] is None:
                break
            if count == 1:
                self._prune(child, length)
                break
            node, index = child, self._next[index - self._base]
            if index < 0:
                break
        if self._first - self._base > TRIM + self.depth:
            del self._text[:TRIM]
            del self._next[:TRIM]
            self._base += TRIM

    def _prune(self, node: int, length: int) -> None:
        left = [(node, length)]
        while left:
            above, size = left.pop()
            for cursor in self._cursors:
                if len(cursor.active) > size and cursor.active[size] == above:
                    del cursor.active[size:]
            kids, self._kids[above] = self._kids[above], None
            for kid in kids or ():
                del self._children[above << TOKEN_BITS | self._tokens[kid]]
                self._unused.append(kid)
                left.append((kid, size + 1))
        self._totals[node] = 0

    def match(self, cursor: Cursor) -> int:
        """Returns the length of the longest suffix that occurred before and has a token after it; 0: there is none."""
        length = len(cursor.active) - 1
        while length and (cursor.recent[-length] < self._first or not self._totals[cursor.active[length]]):
            length -= 1
        return length

    def count(self, run: Sequence[int]) -> int:
        """Returns how often a run of at most `depth` tokens occurred."""
        node = 0
        for at, token in enumerate(run):
            child = self._children.get(node << TOKEN_BITS | token)
            if child is None:
                return 0
            if self._kids[child] is None:
                end = self._last_of(self._starts[child], at + 1)
                for wanted in run[at + 1 :]:
                    end = self._next[end - self._base]
                    if end < 0 or self._text[end - self._base] != wanted:
                        return 0
                return self._counts[child]
            node = child
        return self._counts[node]

    def followers(self, node: int, length: int, least: float, path: Sequence[int]) -> list[Follower]:
        """Returns the tokens that followed a run, the most frequent first; of equals the latest.

        Args:
            node: of the run; where `length` is 0 its last index, as it occurred once; where `length` is -1 minus the
                period of the loop that it is in.
            path: tokens that end with the run, at least `depth` // 2 of them if there are as many.
        """
        if length < 0:
            return [(path[node], 1.0, node, length)]
        if length == 0:
            after = self._next[node - self._base]
            return [(self._text[after - self._base], 1.0, after, 0)] if after >= 0 else []
        if length == self.depth:  # longer runs are not counted: its second half stands for it
            node, length = 0, self.depth // 2
            for token in path[-length:]:
                node = self._children[node << TOKEN_BITS | token]
        total, kids, counts = self._totals[node], self._kids[node], self._counts
        found: list[tuple[int, int, int]] = []
        for kid in kids or ():
            if counts[kid] < least * total:
                break
            found.append((counts[kid], self._starts[kid], kid))
        if len(found) > 1:
            found.sort(reverse=True)
        rows, size = [], length + 1
        for count, start, kid in found:
            is_once = count == 1
            match = (self._last_of(start, size), 0) if is_once else (kid, size)
            rows.append((self._tokens[kid], count / total, *match))
        return rows

    def chain(self, cursor: Cursor, tokens: Sequence[int], num: int, least: float) -> tuple[list[int], list[float]]:
        """Returns the most frequent continuation with a probability of `least`, and each token's given those before."""
        length = self.match(cursor)
        drafts, probs = list[int](), list[float]()
        if not length:
            return drafts, probs
        node, path, prob = cursor.active[length], list(tokens[-self.depth :]), 1.0
        while len(drafts) < num and (found := self.followers(node, length, least, path)):
            token, share, node, length = found[0]
            prob *= share
            if prob < least:
                break
            drafts.append(token)
            probs.append(share)
            path.append(token)
            if length == 0 and node == cursor.last:  # the only occurrence overlaps the draft: a loop goes on
                node, length = -len(drafts), -1
        return drafts, probs

    def branches(
        self, cursor: Cursor, tokens: Sequence[int], num: int, most_depth: int, least: float
    ) -> tuple[list[int], list[int], list[float]]:
        """Returns the most probable continuations as a tree, the most probable path first, of at least `least`.

        Returns:
            Tokens; parents, -1 for children of the root; and the probability of each given its parent.
        """
        length = self.match(cursor)
        drafts, parents, probs = list[int](), list[int](), list[float]()
        if not length:
            return drafts, parents, probs
        known = list(tokens[-self.depth :])
        # (minus the path's probability, order, parent, token, share, node, length, tokens of the path)
        heap: list[tuple[float, int, int, int, float, int, int, list[int]]] = []
        order = 0

        def push(parent: int, prob: float, node: int, size: int, path: list[int]) -> None:
            nonlocal order
            for token, share, after, far in self.followers(node, size, least / prob, known + path):
                if prob * share >= least:
                    heappush(heap, (-prob * share, order, parent, token, share, after, far, [*path, token]))
                    order += 1

        push(-1, 1.0, cursor.active[length], length, [])
        while heap and len(drafts) < num:
            negative, _, parent, token, share, node, size, path = heappop(heap)
            drafts.append(token)
            parents.append(parent)
            probs.append(share)
            if size == 0 and node == cursor.last:
                node, size = -len(path), -1
            if len(path) < most_depth:
                push(len(drafts) - 1, -negative, node, size, path)
        return drafts, parents, probs
