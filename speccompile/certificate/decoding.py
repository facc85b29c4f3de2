# SPDX-License-Identifier: Apache-2.0
"""Decodes prompts for checks: with the drafts of any proposer, forced in every step, without a clock's decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.proposer import Proposer
from speccompile.core.sampling_params import SamplingParams
from speccompile.core.specs import LENGTHS, LOGITS, TOKENS, all_sure
from speccompile.runtime.requests import Speculation
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.speculators.none.config import NoneProposer

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Decoded:
    """Texts of prompts, in their order, and what their drafts did."""

    texts: list[list[int]]
    errors: list[str]
    num_steps: int
    num_drafts: int
    num_accepted: int
    outcomes: dict[tuple[int, int], int]  # {(depth of the drafts, accepted): steps}

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / steps."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else 1.0

    @property
    def counts(self) -> tuple[int, int]:
        return self.num_drafts, self.num_steps

    def facts(self) -> dict[str, Any]:
        """Returns the counts, JSON-ready."""
        return {
            "num_steps": self.num_steps,
            "num_draft_tokens": self.num_drafts,
            "num_accepted": self.num_accepted,
            "mean_acceptance_length": round(self.mean_acceptance_length, 3),
        }


def plain_proposer() -> Proposer:
    return NoneProposer()


def drafts_nothing(engine: SpecEngine) -> bool:
    return isinstance(engine.proposer, NoneProposer)


def make_sequences(
    engine: SpecEngine, prompts: Prompts, params: Sequence[SamplingParams], speculation: Speculation = "on"
) -> list[TokenSequence]:
    """Returns sequences to decode; with `on` they have drafts in every step, whatever a budget expects to gain."""
    jobs = enumerate(zip(prompts, params, strict=True))
    sequences = [engine.make_sequence(index, list(prompt), asked, False) for index, (prompt, asked) in jobs]
    for sequence in sequences:
        sequence.speculation = speculation
    return sequences


def decode_with(
    engine: SpecEngine,
    proposer: Proposer,
    prompts: Prompts,
    params: SamplingParams | Sequence[SamplingParams],
    *,
    batch_size: int = 1,
    is_invariant: bool = False,
    speculation: Speculation = "on",
    tell: Callable[[int], None] = lambda num_ended: None,
) -> Decoded:
    """Decodes prompts to their ends with the drafts of a proposer.

    Args:
        is_invariant: drafts must not change sampled text, see `SequenceBatch`.
        tell: called after each step with the number of texts that have ended.
    """
    asked = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    waiting = make_sequences(engine, prompts, asked, speculation)
    engine.reset(max((sequence.num_prompt for sequence in waiting), default=1))
    num_ended, batch = 0, SequenceBatch(list(waiting), batch_size, is_invariant)
    for steps in decode(engine.verifier, proposer, batch, engine.engines):
        num_ended += sum(step.finish_reason is not None for step in steps)
        tell(num_ended)
    outcomes: dict[tuple[int, int], int] = {}
    for sequence in waiting:
        for key, count in sequence.stats.outcomes.items():
            outcomes[key] = outcomes.get(key, 0) + count
    return Decoded(
        [sequence.tokens[sequence.num_prompt :] for sequence in waiting],
        [sequence.error for sequence in waiting if sequence.error is not None],
        sum(outcomes.values()),
        sum(sequence.stats.num_draft_tokens for sequence in waiting),
        sum(accepted * count for (_, accepted), count in outcomes.items()),
        outcomes,
    )


def gives_logits(engine: SpecEngine) -> bool:
    return any(tensor.name == LOGITS for tensor in engine.verifier.engine.spec.outputs)


def next_logits(engine: SpecEngine, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Returns the target's logits [vocab] float32 after one or more tokens, by a prefill and a step of one node."""
    verifier = engine.verifier
    engine.reset(len(tokens))
    for _ in verifier.prefill(0, tokens):
        pass
    return root_logits(engine, 0, tokens[-1])


def root_logits(engine: SpecEngine, slot: int, token: int) -> NDArray[np.float32]:
    """Returns the logits of a step of one node, [vocab] float32; the slot must not go on from there."""
    verifier = engine.verifier
    feeds = {TOKENS: np.array([[token]], np.int64), LENGTHS: verifier.lengths[slot : slot + 1]}
    feeds |= all_sure(verifier.engine.spec, 1, 1)
    outputs = verifier.engine.run(feeds, first_slot=slot)
    return np.array(np.asarray(outputs[LOGITS])[0, -1], dtype=np.float32)
