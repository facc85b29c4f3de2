# SPDX-License-Identifier: Apache-2.0
"""The decoding loop of a single sequence, with acceptance in numpy: the oracle of the batched one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from speccompile.core.acceptance import accept
from speccompile.core.proposer import Proposer
from speccompile.core.sampling import tree_uniforms, warp
from speccompile.core.specs import LENGTHS, LOGITS, TOKENS, TREE_MASK
from speccompile.runtime.host_verify import verify_on_host
from speccompile.runtime.loop import emit
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from speccompile.runtime.verifier import Verifier


def decode_one(verifier: Verifier, proposer: Proposer, sequence: TokenSequence) -> Iterator[list[int]]:
    """Decodes one sequence, with acceptance in numpy on the target's logits: the oracle of `decode`.

    Yields:
        The new tokens of each step.
    """
    engine, params, batch = verifier.engine, sequence.sampling, SequenceBatch.alone(sequence)
    proposer.start(0, sequence)
    for nodes, start, outputs in verifier.prefill(0, sequence.tokens, sequence.images):
        proposer.prefill(0, sequence, nodes, start, outputs)
    reason, is_first = None, sequence.num_prompt > 1 and verifier.may_read_last  # the first token comes without drafts
    while reason is None:
        sequence.plan(verifier.max_seq_len)
        tree = batch.roots() if is_first else proposer.propose(batch)  # node 0 is the root
        lengths = verifier.lengths[:1]
        outputs = engine.run({TOKENS: tree.tokens, LENGTHS: lengths, TREE_MASK: tree.mask()})
        probs = warp(outputs[LOGITS], [params.temperature], [params.top_k], [params.top_p])
        seeds = np.array([params.seed], dtype=np.uint64)
        draws = tree_uniforms(seeds, batch.root_positions(), tree)
        verdict = accept(tree, probs, draws)
        if params.needs_logits:
            verdict = verify_on_host(verdict, tree, batch.sequences, [0], outputs[LOGITS], draws, tree.draft_probs)
        verifier.commit(tree, verdict)
        if is_first:
            proposer.skip(batch, verdict, outputs)
        else:
            proposer.commit(batch, tree, verdict, outputs)
        [step] = emit(tree, verdict, batch)
        reason, is_first = step.finish_reason, False
        yield step.tokens
