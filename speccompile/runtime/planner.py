# SPDX-License-Identifier: Apache-2.0
"""Who decides how far each step may draft: what the scheduler asks of a controller, and the one without opinions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from speccompile.runtime.slots import Slot, Step


class StepTimes(NamedTuple):
    """Where the time of one step went, in seconds.

    Args:
        propose_s: in the proposer.
        score_s: in the target's forward.
        step_s: all of the step, the two included.
    """

    propose_s: float
    score_s: float
    step_s: float


class Planner(Protocol):
    """Decides before each step, learns from it afterwards. Called on one thread."""

    def plan(self, slots: Sequence[Slot]) -> int | None:
        """Most draft tokens on one path in the next step.

        It holds for the slots that leave the decision to the planner (`Slot.speculation` is `auto`); those with `on`
        draft as far as their limits let, those with `off` never.

        Args:
            slots: all active ones, in the order of their places.

        Returns:
            0: decode plainly; None: no other bound than the slots' own.
        """
        ...

    def observe(self, slots: Sequence[Slot], steps: Sequence[Step], nodes: int, times: StepTimes) -> None:
        """What became of a step.

        Args:
            slots: as given to `plan`.
            steps: one for each of them.
            nodes: that the target scored in each slot, root and padding included.
            times: of the step.
        """
        ...

    def decisions(self) -> dict[str, Any]:
        """What was decided and why, JSON-ready, for the stats."""
        ...


class Unlimited:
    """A planner that never holds back: the methods' own policies decide alone."""

    def plan(self, slots: Sequence[Slot]) -> int | None:
        """No bound."""
        return None

    def observe(self, slots: Sequence[Slot], steps: Sequence[Step], nodes: int, times: StepTimes) -> None:
        """Nothing to learn."""

    def decisions(self) -> dict[str, Any]:
        """None."""
        return {}
