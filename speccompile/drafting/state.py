# SPDX-License-Identifier: Apache-2.0
"""What a method knows of one sequence, in an object that the sequence carries wherever it stands in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from speccompile.core.protocols import Slot
from speccompile.core.tree import Floats
from speccompile.drafting.growth import Calibration, Reach

Lessons = TypeVar("Lessons")


@dataclass(slots=True, eq=False)
class DraftState(Generic[Lessons]):
    """The `draft_state` of a sequence.

    Args:
        lessons: what its verdicts have taught.
        hidden: [width] float32, the target's hidden state in front of the root, as far as `TargetStates` has it on
            the host.
        features: [num, width] float32 each, rows that `PendingFeatures` has on the host, in order.
        num_live: rows that follow them in the target's outputs.
    """

    lessons: Lessons
    hidden: Floats | None = None
    features: list[Floats] = field(default_factory=list)
    num_live: int = 0


@dataclass(slots=True, eq=False)
class TreeLessons:
    """What verdicts on trees have taught.

    Args:
        reach: how many drafts were kept of late.
        calibration: of the draft's confidences.
    """

    reach: Reach
    calibration: Calibration


def tree_lessons(slots: Sequence[Slot]) -> list[TreeLessons]:
    """Returns the lessons of sequences whose `draft_state` has `TreeLessons`."""
    return [slot.draft_state.lessons for slot in slots]


def same_sequences(first: Sequence[Slot], second: Sequence[Slot]) -> bool:
    """Tells whether two batches are of the same sequences in the same order."""
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))
