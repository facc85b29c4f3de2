# SPDX-License-Identifier: Apache-2.0
"""A drafter whose tokens are all shifted by one, and what the check of acceptance says of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from speccompile.certificate.acceptance import check_acceptance
from speccompile.certificate.greedy import plain_texts
from speccompile.runtime.spec_engine import SpecEngine


def shift_drafts(engine: SpecEngine) -> None:
    """Shifts every draft token of an engine by one from now on; the texts stay the target's."""
    propose, vocab = engine.proposer.propose, engine.verifier.engine.spec.vocab_size

    def shifted(batch: Any) -> Any:
        tree = propose(batch)
        tokens = (tree.tokens + 1) % vocab
        tokens[:, 0] = tree.tokens[:, 0]
        return replace(tree, tokens=tokens)

    engine.proposer.propose = shifted  # type: ignore[method-assign]


def check_that_a_shift_shows(engine: SpecEngine, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
    """Asserts that acceptance passes as the engine is, and fails with every draft token shifted by one."""
    engine.controller = None
    plain = plain_texts(engine, prompts, num_tokens)
    right = check_acceptance(engine, prompts, plain, None, "no checkpoint here")
    assert right.status == "passed", right.summary
    shift_drafts(engine)
    wrong = check_acceptance(engine, prompts, plain, None, "no checkpoint here")
    del engine.proposer.propose
    assert wrong.status == "failed", wrong.summary
    assert wrong.facts["own"]["share"] < right.facts["own"]["share"]
