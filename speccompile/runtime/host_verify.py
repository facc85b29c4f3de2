# SPDX-License-Identifier: Apache-2.0
"""What the host computes from the logits of a step: verdicts with logits processors, and logprobs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speccompile.core.acceptance import accept_slot
from speccompile.core.tree import Floats, TokenTree, Verdict
from speccompile.runtime.grammars import GrammarFault
from speccompile.runtime.logits_processors import LogitsProcessor, TreeProbs
from speccompile.runtime.logprobs import TokenLogprobs, log_softmax, token_logprobs
from speccompile.runtime.sequences import TokenSequence


def verify_on_host(
    verdict: Verdict,
    tree: TokenTree,
    sequences: Sequence[TokenSequence],
    slot_indices: Sequence[int],
    logits: Floats,
    uniforms: Floats | None,
    draft_probs: Floats | None,
) -> Verdict:
    """Returns the verdict with the rows of some slots computed from their processed logits; others are unchanged.

    Where the grammar of a sequence fails, its next token is -1, and `TokenSequence.fault` says why.

    Args:
        slot_indices: slot indices of the sequences that need logits processors.
        logits: [batch, nodes, vocab] float32.
        uniforms: [batch, nodes, 2] float32; None: every sequence is greedy.
        draft_probs: [batch, nodes, vocab] float32, see `accept_slot`; None: drafts are deterministic.
    """
    path, num_accepted, next_token = (a.copy() for a in (verdict.path, verdict.num_accepted, verdict.next_token))
    none = np.zeros((tree.nodes, 2), dtype=np.float32)
    for slot in slot_indices:
        if next_token[slot] < 0:  # logits that are not finite have no distribution
            sequences[slot].fault = None
            continue
        tokens, parents = tree.tokens[slot], tree.parents[slot]
        draws = none if uniforms is None else uniforms[slot]
        dists = None if draft_probs is None else draft_probs[slot]
        try:
            probs = TreeProbs(_logits_processor(sequences[slot], logits.shape[-1]), tokens, parents, logits[slot])
            sequences[slot].fault, (kept, follows) = None, accept_slot(tokens, parents, probs, draws, dists)
            if probs.ends.intersection(kept):  # the next step fails at its root, as without drafts
                num = next(at for at, node in enumerate(kept) if node in probs.ends)
                kept, follows = kept[:num], int(tokens[kept[num]])
        except GrammarFault as fault:
            sequences[slot].fault, kept, follows = fault, [0], -1
        path[slot], path[slot, : len(kept)] = -1, kept
        num_accepted[slot], next_token[slot] = len(kept) - 1, follows
    return Verdict(path, num_accepted, next_token)


def logprobs_of_step(
    verdict: Verdict, tree: TokenTree, sequences: Sequence[TokenSequence], logits: Floats
) -> dict[int, list[TokenLogprobs]]:
    """Returns the logprobs of the tokens that a step emits, by slot index, of the sequences that ask for them.

    A token's row is that of its parent on the path. `logits` is [batch, nodes, vocab] float32.
    """
    found = {}
    for slot, sequence in enumerate(sequences):
        num = sequence.sampling.logprobs
        if num is None or verdict.following[slot] < 0:
            continue
        path = verdict.nodes_kept(slot)
        tokens = [*tree.tokens_on(slot, path[1:]), verdict.following[slot]]
        if sequence.sampling.logprobs_mode == "raw_logprobs":
            rows = log_softmax(logits[slot, path])
        else:
            processor = _logits_processor(sequence, logits.shape[-1])
            rows = np.stack([processor.logprobs(logits[slot, node], tokens[:at]) for at, node in enumerate(path)])
        found[slot] = [token_logprobs(row, token, num) for row, token in zip(rows, tokens, strict=True)]
    return found


def _logits_processor(sequence: TokenSequence, vocab_size: int) -> LogitsProcessor:
    if sequence.logits_processor is None:
        sequence.logits_processor = LogitsProcessor(
            sequence.sampling, sequence.num_prompt, vocab_size, sequence.grammar
        )
    sequence.logits_processor.read(sequence.tokens)
    return sequence.logits_processor
