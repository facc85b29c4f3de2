# SPDX-License-Identifier: Apache-2.0
"""What a method knows of one sequence, in an object that the sequence carries wherever it stands in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from speccompile.core.protocols import Slot
from speccompile.core.tree import Floats
from speccompile.drafting.acceptance import AcceptanceEstimate
from speccompile.drafting.drawn_length import DrawnRecord


@dataclass(slots=True, eq=False)
class DraftState:
    """The `draft_state` of a sequence.

    Args:
        estimate: what its verdicts tell of its drafts; None where nothing is ever learnt.
        hidden: [width] float32, the target's hidden state in front of the root, as far as `TargetStates` has it on
            the host.
        features: [num, width] float32 each, rows that `PendingFeatures` has on the host, in order.
        num_live: rows that follow them in the target's outputs.
        drawn: what verdicts on drawn chains have taught; None before the first of an adaptive length.
    """

    estimate: AcceptanceEstimate | None
    hidden: Floats | None = None
    features: list[Floats] = field(default_factory=list)
    num_live: int = 0
    drawn: DrawnRecord | None = None


def estimates(slots: Sequence[Slot]) -> list[AcceptanceEstimate]:
    """Returns the estimates of sequences whose `draft_state` is a `DraftState`."""
    return [slot.draft_state.estimate for slot in slots]


def same_sequences(first: Sequence[Slot], second: Sequence[Slot]) -> bool:
    """Tells whether two batches are of the same sequences in the same order."""
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))
