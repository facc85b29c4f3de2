# SPDX-License-Identifier: Apache-2.0
"""Acceptance of a method's drafts beside that of the same drafts with other tokens: for methods of any kind.

A drafter whose tokens are wrong (by a table, by their order) gives no wrong text. Its drafts are then accepted no more
often than any tokens are, or less often than what they are off by one from. Both is shown by the same drafts, as many
and in the same trees, with every id one higher and one lower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

from speccompile.certificate.decoding import Decoded, Prompts, decode_with
from speccompile.certificate.planted_drafts import ShiftedDrafts
from speccompile.core.proposer import Proposer
from speccompile.core.sampling_params import SamplingParams
from speccompile.runtime.spec_engine import SpecEngine

LEAST_ERRORS = 2.5  # standard errors of the difference of the shares
OWN, SHIFTS = "the method's drafts", {"the same, each id one higher": 1, "the same, each id one lower": -1}


@dataclass(frozen=True)
class FirstDrafts:
    """Of steps with drafts: how many kept one at least."""

    num_steps: int
    num_kept: int

    @classmethod
    def of(cls, decoded: Decoded) -> FirstDrafts:
        rows = [(accepted, num) for (depth, accepted), num in decoded.outcomes.items() if depth]
        return cls(sum(num for _, num in rows), sum(num for accepted, num in rows if accepted))

    @property
    def share(self) -> float:
        return self.num_kept / max(1, self.num_steps)

    def facts(self) -> dict[str, Any]:
        return {"num_steps_with_drafts": self.num_steps, "num_that_kept_one": self.num_kept, "share": self.share}


def is_better(own: FirstDrafts, shifted: FirstDrafts) -> bool:
    """Returns whether drafts are kept more often than shifted ones, by `LEAST_ERRORS` standard errors."""
    if not (own.num_steps and shifted.num_steps):
        return False
    share = (own.num_kept + shifted.num_kept) / (own.num_steps + shifted.num_steps)
    error = math.sqrt(share * (1 - share) * (1 / own.num_steps + 1 / shifted.num_steps))
    return own.share > shifted.share + LEAST_ERRORS * error


def decode_shifted(engine: SpecEngine, prompts: Prompts, num_tokens: int) -> dict[str, Decoded]:
    """Returns by `OWN` and the names of `SHIFTS` the greedy texts with these drafts."""
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    batch_size, vocab = min(engine.context.max_slots, len(prompts)), engine.verifier.engine.spec.vocab_size
    runs = {OWN: engine.proposer}
    runs |= {name: cast(Proposer, ShiftedDrafts(engine.proposer, vocab, shift)) for name, shift in SHIFTS.items()}
    made = dict[str, Decoded]()
    for name, proposer in runs.items():
        made[name] = decode_with(engine, proposer, prompts, params, batch_size=batch_size)
    return made
