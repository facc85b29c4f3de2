# SPDX-License-Identifier: Apache-2.0
"""What a method keeps for one sequence, in an object that moves with the sequence between slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from speccompile.core.protocols import TokenSequence
from speccompile.core.tree import Floats
from speccompile.drafting.acceptance import AcceptanceEstimate
from speccompile.drafting.drawn_length import DrawnRecord


@dataclass(slots=True, eq=False)
class DraftState:
    """The `draft_state` of a sequence.

    Args:
        estimate: of the acceptance of its drafts; None where nothing is estimated.
        hidden: [width] float32, the target's hidden state of the token before the root; None where `TargetStates` does
            not have it on the host.
        features: [num, width] float32 each, rows that `PendingFeatures` has on the host, in order.
        states: rows of the target's outputs on the host, after these; an array for each name of `PendingFeatures`.
        num_live: number of rows after these, still in the target's last outputs.
        drawn: estimates from verdicts on drawn chains; None before the first chain of adaptive length.
    """

    estimate: AcceptanceEstimate | None
    hidden: Floats | None = None
    features: list[Floats] = field(default_factory=list)
    states: list[tuple[NDArray[Any], ...]] = field(default_factory=list)
    num_states: int = 0
    num_live: int = 0
    drawn: DrawnRecord | None = None


def estimates(sequences: Sequence[TokenSequence]) -> list[AcceptanceEstimate]:
    return [sequence.draft_state.estimate for sequence in sequences]


def same_sequences(first: Sequence[TokenSequence], second: Sequence[TokenSequence]) -> bool:
    """Returns whether two batches have the same sequences in the same order."""
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))
