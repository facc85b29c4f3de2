# SPDX-License-Identifier: Apache-2.0
"""What a lookup found as a branch of another drafter's tree: the shared prefix once, the rest after the tree's nodes.

The nodes of the tree keep their order and come first, so its drafter learns from the verdict as if alone
(`drafting.acceptance.own_path`). Where a drafter has other tokens, a lookup is more often wrong than its rate says:
first tokens of branches have log odds of their own, learned from every token emitted after their parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speccompile.core.tree import TokenTree, Verdict
from speccompile.drafting.acceptance import AcceptanceEstimate, SharedPrior, emitted_tokens
from speccompile.drafting.budget import Budget
from speccompile.drafting.tree import DraftTrees

FIRST_ODDS = -1.0  # log odds between the lookup's rate and that of a branch, before any verdict


@dataclass(frozen=True)
class Branch:
    """Nodes of one sequence that a lookup adds to a tree, parents before their children."""

    tokens: list[int]
    parents: list[int]  # nodes of the merged tree; the first node of the branch is `num_nodes`
    probs: list[float]
    sure: list[float]  # the lookup's own probability, given the parent
    num_nodes: int


def find_branch(tree: TokenTree, slot: int, found: DraftTrees, estimate: AcceptanceEstimate) -> Branch:
    """Returns what a lookup found in one sequence after the same root that a deterministic tree does not have."""
    num, most = int(tree.num_nodes[slot]), 1 + found.count(slot)
    rows = zip(tree.parents[slot, 1:num].tolist(), tree.tokens[slot, 1:num].tolist(), strict=True)
    children = {key: node for node, key in enumerate(rows, 1)}
    node_of, branch, paths = [0], Branch([], [], [], [], num), found.paths[slot].tolist()
    parts = (part[slot, 1:most].tolist() for part in (found.parents, found.tokens, found.probs))
    for above, token, sure in zip(*parts, strict=True):
        parent = node_of[above]
        node = children.setdefault((parent, token), num + len(branch.tokens))
        node_of.append(node)
        if node == num + len(branch.tokens):
            is_first = parent < num
            path = paths[above] if is_first else branch.probs[parent - num]
            branch.tokens.append(token)
            branch.parents.append(parent)
            branch.sure.append(sure)
            branch.probs.append(path * (estimate.prob(sure) if is_first else sure))
    return branch


def with_branches(tree: TokenTree, branches: Sequence[Branch], num: int) -> TokenTree:
    """Returns a tree with the most probable nodes of the branches after its own."""
    kept = [sorted(sorted(range(len(b.tokens)), key=b.probs.__getitem__, reverse=True)[:num]) for b in branches]
    if not any(kept):
        return tree
    rows = [tree.nodes_of(slot) for slot in range(tree.batch)]
    for (tokens, parents), branch, nodes in zip(rows, branches, kept, strict=True):
        node_of = {branch.num_nodes + node: branch.num_nodes + at for at, node in enumerate(nodes)}
        tokens += [branch.tokens[node] for node in nodes]
        parents += [node_of.get(above, above) for above in map(branch.parents.__getitem__, nodes)]
    return TokenTree.ragged([tokens for tokens, _ in rows], [parents for _, parents in rows])


class Branches:
    """Adds a lookup's drafts to trees, as many as the `budget` finds worth it, and learns their acceptance."""

    def __init__(self, budget: Budget) -> None:
        self.budget, self.estimate = budget, AcceptanceEstimate(SharedPrior(1), FIRST_ODDS, (1.0,))
        self._found: list[Branch | None] = []  # of the last step, by slot

    def begin(self) -> None:
        self._found = []

    def add(self, tree: TokenTree, found: Sequence[DraftTrees | None], expected: float, spent_ms: float) -> TokenTree:
        """Returns the tree to score.

        Args:
            found: by slot, a lookup's drafts where the tree is another drafter's; None: nothing is added.
            expected: drafts of the tree that are expected to be accepted, over all sequences.
        """
        estimate = self.estimate
        self._found = [None if f is None else find_branch(tree, slot, f, estimate) for slot, f in enumerate(found)]
        branches = [b or Branch([], [], [], [], int(tree.num_nodes[s])) for s, b in enumerate(self._found)]
        num_own = int(tree.num_nodes.max()) - 1
        ranked = [sorted(branch.probs, reverse=True) for branch in branches]
        most = min(max(map(len, ranked)), self.budget.max_nodes - num_own)
        gains = [sum(probs[at] for probs in ranked if at < len(probs)) for at in range(most)]
        num, _, _ = self.budget.best(gains, tree.batch, spent_ms, held=num_own, expected=expected)
        return with_branches(tree, branches, num - num_own) if num > num_own else tree

    def learn(self, tree: TokenTree, verdict: Verdict) -> None:
        """Learns from the verdict on the scored tree."""
        for slot, branch in enumerate(self._found):
            if branch is None or not branch.tokens:
                continue
            depths = {int(node): depth for depth, node in enumerate(verdict.path[slot]) if 0 <= node < branch.num_nodes}
            emitted = emitted_tokens(tree, verdict, slot)
            for token, parent, sure in zip(branch.tokens, branch.parents, branch.sure, strict=True):
                if parent in depths:
                    self.estimate.learn_rank(0, (emitted[depths[parent]] == token) - self.estimate.prob(sure))
