# SPDX-License-Identifier: Apache-2.0
"""Sequences for a planner, and telling it of a step as the loop does."""

from speccompile.core.protocols import StepTimes
from speccompile.core.sampling_params import SamplingParams
from speccompile.runtime.control import Planner
from speccompile.runtime.sequences import Step, TokenSequence


def sequences(num: int, speculation: str = "auto") -> list[TokenSequence]:
    made = [TokenSequence(i, [1], SamplingParams(), frozenset(), None) for i in range(num)]
    for sequence in made:
        sequence.speculation = speculation
    return made


def tell(planner: Planner, active: list[TokenSequence], steps: list[Step], times: StepTimes) -> None:
    """Tells of a step, as the loop does."""
    if planner.num_rests:
        planner.rested(active, 1, times.step_s)
    else:
        planner.observe(active, steps, times)
