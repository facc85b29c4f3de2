# SPDX-License-Identifier: Apache-2.0
"""Verdicts on sequences that need logits processors: computed on the host, from the logits of the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speccompile.core.acceptance import Verdict, accept_slot
from speccompile.core.tree import Floats, TokenTree
from speccompile.runtime.logits_processors import LogitsProcessor, TreeProbs
from speccompile.runtime.slots import Slot


def verify_on_host(
    verdict: Verdict,
    tree: TokenTree,
    slots: Sequence[Slot],
    slot_indices: Sequence[int],
    logits: Floats,
    uniforms: Floats | None,
    draft_probs: Floats | None,
) -> Verdict:
    """Returns the verdict with the rows of some slots computed from their processed logits; others are unchanged.

    Args:
        verdict: of the target's graph, which has temperature, top-k and top-p alone; not changed.
        tree: the scored tree.
        slots: all sequences of the batch.
        slot_indices: slot indices of the sequences that need logits processors.
        logits: [batch, nodes, vocab] float32.
        uniforms: [batch, nodes, 2] float32; None: every slot is greedy.
        draft_probs: [batch, nodes, vocab] float32, see `accept_slot`; None: drafts are deterministic.
    """
    path, num_accepted, next_token = (a.copy() for a in (verdict.path, verdict.num_accepted, verdict.next_token))
    none = np.zeros((tree.nodes, 2), dtype=np.float32)
    for slot in slot_indices:
        if next_token[slot] < 0:  # logits that are not finite have no distribution
            continue
        tokens, parents = tree.tokens[slot], tree.parents[slot]
        probs = TreeProbs(_logits_processor(slots[slot], logits.shape[-1]), tokens, parents, logits[slot])
        draws = none if uniforms is None else uniforms[slot]
        kept, follows = accept_slot(tokens, parents, probs, draws, None if draft_probs is None else draft_probs[slot])
        path[slot], path[slot, : len(kept)] = -1, kept
        num_accepted[slot], next_token[slot] = len(kept) - 1, follows
    return Verdict(path, num_accepted, next_token)


def _logits_processor(slot: Slot, vocab_size: int) -> LogitsProcessor:
    if slot.logits_processor is None:
        slot.logits_processor = LogitsProcessor(slot.sampling, slot.num_prompt, vocab_size)
    slot.logits_processor.read(slot.tokens)
    return slot.logits_processor
