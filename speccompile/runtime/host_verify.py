# SPDX-License-Identifier: Apache-2.0
"""Verdicts on sequences whose probs depend on the tokens before: made on the host, from the logits of the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speccompile.core.acceptance import Verdict, accept_slot
from speccompile.core.tree import Floats, TokenTree
from speccompile.runtime.logits_processors import LogitsProcessor, TreeDists
from speccompile.runtime.slots import Slot


def verify_on_host(
    verdict: Verdict,
    tree: TokenTree,
    slots: Sequence[Slot],
    places: Sequence[int],
    logits: Floats,
    uniforms: Floats | None,
    draft_probs: Floats | None,
) -> Verdict:
    """`verdict` with those of some slots made anew by their own probs; the others keep what the target's graph decided.

    Args:
        verdict: of the graph, which knows temperature, top-k and top-p alone; not changed.
        tree: what was scored.
        slots: all of the batch.
        places: of those whose distribution is shaped.
        logits: [batch, nodes, vocab] float32.
        uniforms: [batch, nodes, 2] float32; None: every slot is greedy.
        draft_probs: as acceptance takes them, [batch, nodes, vocab] float32; None: drafts are deterministic.
    """
    path, num_accepted, next_token = (a.copy() for a in (verdict.path, verdict.num_accepted, verdict.next_token))
    none = np.zeros((tree.nodes, 2), dtype=np.float32)
    for place in places:
        if next_token[place] < 0:  # no distribution can be made of logits that are not finite
            continue
        tokens, parents = tree.tokens[place], tree.parents[place]
        dists = TreeDists(_logits_processor(slots[place], logits.shape[-1]), tokens, parents, logits[place])
        draws = none if uniforms is None else uniforms[place]
        kept, follows = accept_slot(tokens, parents, dists, draws, None if draft_probs is None else draft_probs[place])
        path[place], path[place, : len(kept)] = -1, kept
        num_accepted[place], next_token[place] = len(kept) - 1, follows
    return Verdict(path, num_accepted, next_token)


def _logits_processor(slot: Slot, vocab_size: int) -> LogitsProcessor:
    if slot.logits_processor is None:
        slot.logits_processor = LogitsProcessor(slot.sampling, slot.num_prompt, vocab_size)
    slot.logits_processor.read(slot.tokens)
    return slot.logits_processor
