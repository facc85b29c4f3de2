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
        step_s: all of the step, the two included; to a planner, with handing out what it gave.
    """

    propose_s: float
    score_s: float
    step_s: float


class Planner(Protocol):
    """Decides before each step, learns from it afterwards. Called on one thread."""

    def plan(self, slots: Sequence[Slot]) -> int | None:
        """Most draft tokens on one path in the next step.

        It holds for the slots that leave the decision to the planner (`Slot.speculation` is `auto`). Those with `on`
        draft in any case: so many tokens, or `loop.FORCED_LENGTH` where this names none; those with `off` never do.

        Args:
            slots: all active ones, in the order of their places.

        Returns:
            0: decode plainly; above 0: chains of so many tokens, whatever policies think; None: as the method's own
            policy likes.
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

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        """A part of a prompt was read.

        Args:
            num_tokens: of the part.
            draft_s: seconds of it that went into reading for drafts, which plain decoding could do without; None: none.
        """
        ...

    def expects_drafts(self, num_active: int) -> bool:
        """Whether a sequence that joins will probably draft: otherwise its prompt need not be read for that.

        Args:
            num_active: sequences that will decode then.
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

    def read(self, num_tokens: int, draft_s: float | None) -> None:
        """Nothing to learn."""

    def expects_drafts(self, num_active: int) -> bool:
        """It may."""
        return True

    def decisions(self) -> dict[str, Any]:
        """None."""
        return {}
