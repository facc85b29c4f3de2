# SPDX-License-Identifier: Apache-2.0
"""One tree to score of the trees of several drafters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speccompile.core.tree import Ints, TokenTree


def merge_trees(trees: Sequence[TokenTree], picks: Sequence[int]) -> TokenTree:
    """Returns the tree that has, in each sequence, one of these."""
    first = trees[picks[0]]
    if all(pick == picks[0] for pick in picks):
        return first
    num_nodes = np.array([trees[pick].num_nodes[slot] for slot, pick in enumerate(picks)], dtype=np.int64)
    shape = (len(picks), int(num_nodes.max()))
    tokens, is_chain = np.zeros(shape, dtype=np.int64), True
    parents: Ints = np.full(shape, -1, dtype=np.int64)
    for slot, (pick, num) in enumerate(zip(picks, num_nodes.tolist(), strict=True)):
        tokens[slot, :num] = trees[pick].tokens[slot, :num]
        parents[slot, :num] = trees[pick].parents[slot, :num]
        is_chain = is_chain and parents[slot, :num].tolist() == list(range(-1, num - 1))
    return TokenTree.chain(tokens, num_nodes) if is_chain else TokenTree(tokens, parents, num_nodes)
