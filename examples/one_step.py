#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One step by hand: read a prompt, draft a tree, score it, keep a path of it.

python examples/one_step.py [BUNDLE] [PROMPT]
"""

from __future__ import annotations

import sys

from speccompile import SamplingParams, SpecEngine, load
from speccompile.runtime.loop import read_prompts
from speccompile.runtime.sequences import SequenceBatch


def one_step(engine: SpecEngine, prompt: str) -> None:
    verifier, proposer, tokenizer = engine.verifier, engine.proposer, engine.tokenizer
    engine.reset()
    sequence = engine.make_sequence(0, prompt, SamplingParams(max_new_tokens=16), with_text=False)
    batch = SequenceBatch([sequence], max_slots=1)
    read_prompts(verifier, proposer, batch)

    sequence.plan(engine.context.max_seq_len, 4)  # at most 4 draft tokens on a path
    batch.is_forced = True  # draft, whatever it costs
    tree = proposer.propose(batch)  # node 0 is the last token of the text
    tree, verdict = verifier.score_finite(tree, batch)  # one run of the target over all nodes
    verifier.commit(tree, verdict)  # the cache keeps the path

    path = verdict.nodes_kept(0)
    tree.show(texts=[tokenizer.decode([token]) for token in tree.tokens[0].tolist()], path=path)
    new = [*tree.tokens_on(0, path[1:]), verdict.following[0]]
    num = f"{len(path) - 1} of {tree.num_draft_tokens[0]} draft tokens accepted"
    print(f"{num}; the text goes on: {tokenizer.decode(new)!r}")


if __name__ == "__main__":
    given = sys.argv[1:]
    one_step(load(given[0] if given else "bundles/pycode"), given[1] if given[1:] else "def add(a, b):\n    return")
