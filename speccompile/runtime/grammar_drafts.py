# SPDX-License-Identifier: Apache-2.0
"""What grammars have to do with the drafts of a step: they follow the text, force chains, and refuse drafts.

Methods mask their own drafts (`drafting.grammars`); chains are cut here once more, whoever made them.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from speccompile.core.tree import TokenTree
from speccompile.drafting.grammars import chains_within
from speccompile.runtime.grammars import GrammarFault
from speccompile.runtime.slots import Slots


def read_grammars(slots: Slots) -> None:
    """Makes the grammars follow the texts, before drafts are made; what fails here is reported with the verdict."""
    for slot in slots.slots:
        if slot.grammar is not None:
            with suppress(GrammarFault):
                slot.grammar.read(slot.tokens)


def forced_chains(slots: Slots) -> TokenTree | None:
    """Returns chains of the tokens that the grammars force; None unless every sequence has some.

    They cost no draft, and are verified as any other drafts. Where some sequences have none, the method's drafts begin
    with those of the others. Where texts depend on drafts there are none, as one sequence's drafts must not depend on
    the others.

    Args:
        slots: whose grammars have read the texts.
    """
    if slots.may_draw or not slots.max_forced:
        return None
    rows = []
    for slot in slots.slots:
        if slot.grammar is None or slot.speculation == "off" or not slot.may_draft:
            return None
        num = min(slot.num_prompt + slot.sampling.max_new_tokens - len(slot.tokens) - 1, slot.room, slots.max_forced)
        forced = slot.grammar.forced()[: max(num, 0)]
        if not forced:
            return None
        rows.append([slot.tokens[-1], *forced])
    nums = np.array([len(row) for row in rows], dtype=np.int64)
    tokens = np.zeros((len(rows), nums.max()), dtype=np.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    return TokenTree.chain(tokens, nums)


def within_grammars(slots: Slots, tree: TokenTree) -> TokenTree:
    """Returns a step's drafts without what the grammars refuse, where they are chains."""
    if not tree.is_chain or tree.nodes == 1:
        return tree
    return chains_within(slots, tree, is_drawn=slots.is_drawn(tree))
