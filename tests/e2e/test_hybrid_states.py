# SPDX-License-Identifier: Apache-2.0
"""After drafters took turns, the one with graphs drafts as after a prompt that it read as a whole.

A draft with a cache of its own has the same bits. One that reads the target's states has the target's bits, and those
of rows that were read in another number at once differ in the last places in the graphs of these tests.
"""

import random

import numpy as np
import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.runtime.loop import read_prompts, run_step
from speccompile.runtime.sequences import SequenceBatch
from speccompile.speculators.hybrid import proposer as proposer_module
from tests.e2e.test_methods import prompts

NUM_STEPS = 9


def next_drafts(engine, watched, batch):
    """Returns what the watched engine gives in the first run of a step in which it drafts."""
    seen = []
    run = watched.run

    def record(feeds, first_slot=0):
        outputs = run(feeds, first_slot)
        seen.append({name: np.array(value) for name, value in outputs.items()})
        return outputs

    watched.run = record
    for sequence in batch.sequences:
        sequence.plan(engine.verifier.max_seq_len)
    tree = engine.proposer.propose(batch)
    del watched.run
    return tree, seen[0]


@pytest.mark.parametrize("form", ["chain", "tree"])
def test_the_next_drafts_have_the_bits_of_a_prompt_that_was_read_anew(lab, monkeypatch, form):
    engine = lab("hybrid", form, "onnxruntime")
    [watched] = engine.engines[1:]
    rng, used = random.Random(3), []
    monkeypatch.setattr(proposer_module, "choose", lambda known, num, offers, scores: rng.randrange(-1, len(offers)))
    asked = SamplingParams(max_new_tokens=60, ignore_eos=True)
    for prompt in prompts()[:3]:
        engine.reset()
        batch = SequenceBatch([engine.make_sequence(0, prompt, asked, False)], 1)
        read_prompts(engine.verifier, engine.proposer, batch)
        for _ in range(NUM_STEPS):
            run_step(engine.verifier, engine.proposer, batch)
            used += engine.proposer._picks
        text = list(batch.sequences[0].tokens)
        monkeypatch.setattr(proposer_module, "choose", lambda known, num, offers, scores: 0)
        monkeypatch.setattr(engine.proposer, "_free", [])
        tree, switched = next_drafts(engine, watched, batch)
        engine.reset()
        anew = SequenceBatch([engine.make_sequence(0, text[:-1], asked, False)], 1)
        read_prompts(engine.verifier, engine.proposer, anew)
        assert anew.sequences[0].tokens == text  # the last token came with the prompt
        tree_anew, read = next_drafts(engine, watched, anew)
        monkeypatch.undo()
        monkeypatch.setattr(
            proposer_module, "choose", lambda known, num, offers, scores: rng.randrange(-1, len(offers))
        )
        # How many drafts a tree has depends on what was learned of their acceptance.
        assert tree.nodes > 1 and tree_anew.nodes > 1
        for name in ("candidates", "candidate_probs"):
            first, second = switched[name][:, -1], read[name][:, -1]
            assert first.tobytes() == second.tobytes() or (form == "tree" and np.allclose(first, second, rtol=2e-3)), (
                name
            )
    assert set(used) >= {0, 1}
