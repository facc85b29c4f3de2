# SPDX-License-Identifier: Apache-2.0
"""Sequences for a planner, and telling it of a step as the loop does."""

from collections.abc import Iterable, Sequence

from speccompile.core.sampling_params import SamplingParams
from speccompile.runtime.control import FixedLength
from speccompile.runtime.sequences import TokenSequence


def sequences(num: int, speculation: str = "auto") -> list[TokenSequence]:
    made = [TokenSequence(i, [1], SamplingParams(), frozenset(), None) for i in range(num)]
    for sequence in made:
        sequence.speculation = speculation
    return made


class Limits(FixedLength):
    """A planner with another limit in each step."""

    def __init__(self, limits: Iterable[int | None]) -> None:
        super().__init__()
        self.limits = iter(limits)

    def plan(self, sequences: Sequence[TokenSequence]) -> int | None:
        return next(self.limits)
