# SPDX-License-Identifier: Apache-2.0
"""What grammars have to do with the drafts of a step: they follow the text, force chains, and refuse drafts."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from speccompile.core.tree import TokenTree
from speccompile.drafting.grammars import chains_within
from speccompile.runtime.grammars import GrammarFault
from speccompile.runtime.sequences import SequenceBatch


def read_grammars(batch: SequenceBatch) -> None:
    """Makes the grammars follow the texts, before drafts are made; what fails here is reported with the verdict."""
    for sequence in batch.sequences:
        if sequence.grammar is not None:
            with suppress(GrammarFault):
                sequence.grammar.read(sequence.tokens)


def forced_chains(batch: SequenceBatch) -> TokenTree | None:
    """Returns chains of the tokens that the grammars force; None unless every sequence has some.

    They cost no draft, and are verified. There are none where texts depend on drafts, as one sequence's drafts must not
    depend on the others.
    """
    if batch.may_draw or not batch.max_forced:
        return None
    rows = []
    for sequence in batch.sequences:
        if sequence.grammar is None or sequence.speculation == "off" or not sequence.may_draft:
            return None
        num = min(
            sequence.num_prompt + sequence.sampling.max_new_tokens - len(sequence.tokens) - 1,
            sequence.room,
            batch.max_forced,
        )
        forced = sequence.grammar.forced()[: max(num, 0)]
        if not forced:
            return None
        rows.append([sequence.tokens[-1], *forced])
    nums = np.array([len(row) for row in rows], dtype=np.int64)
    tokens = np.zeros((len(rows), nums.max()), dtype=np.int64)
    for slot, row in enumerate(rows):
        tokens[slot, : len(row)] = row
    return TokenTree.chain(tokens, nums)


def within_grammars(batch: SequenceBatch, tree: TokenTree) -> TokenTree:
    """Returns a step's drafts without what the grammars refuse, where they are chains."""
    if not tree.is_chain or tree.nodes == 1:
        return tree
    return chains_within(batch, tree, is_drawn=batch.is_drawn(tree))
