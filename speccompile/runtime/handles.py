# SPDX-License-Identifier: Apache-2.0
"""Requests that were accepted, and the queue in which their sequences wait for a slot."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest

from speccompile.runtime.requests import Request, StepOutput
from speccompile.runtime.sequences import TokenSequence


class RequestHandle:
    """Requests that were submitted as one; used to cancel them.

    Args:
        requests: as submitted; their outputs are numbered one after another.
        timeout_s: seconds from submission to the last token; None: no limit.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        number: int,
        submitted_s: float,
        timeout_s: float | None = None,
        on_output: Callable[[StepOutput], None] = lambda step_output: None,
    ) -> None:
        self.requests, self.number, self.submitted_s, self.on_output = tuple(requests), number, submitted_s, on_output
        self.deadline_s = None if timeout_s is None else submitted_s + timeout_s
        self.open: list[TokenSequence] = []  # that have not ended
        self.is_waiting = True  # none of them has a slot yet

    def add(self, sequence: TokenSequence) -> None:
        """Adds a sequence, before the handle is added to a scheduler."""
        sequence.handle = self
        self.open.append(sequence)


class FairQueue:
    """One output of each waiting request after another, in the order in which the requests came.

    A request that has just had its turn goes after all others only when the next turn comes, so that one that arrives
    in between is before it.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[int, deque[TokenSequence]] = OrderedDict()  # by number of the request handle
        self._front: deque[TokenSequence] = deque()  # out of turn
        self._last = -1  # whose turn was last: it is the first of `_turns` where it has outputs left

    def __len__(self) -> int:
        return len(self._front) + sum(map(len, self._turns.values()))

    def __bool__(self) -> bool:
        return bool(self._front or self._turns)

    def __iter__(self) -> Iterator[TokenSequence]:
        """Returns the outputs in the order in which they would be taken."""
        turns = list(self._turns.values())
        start = int(self._last in self._turns)
        rounds = zip_longest(*turns[start:], *turns[:start])
        return chain(self._front, (sequence for turn in rounds for sequence in turn if sequence is not None))

    def add(self, handle: RequestHandle) -> None:
        self._turns[handle.number] = deque(handle.open)

    def put_back(self, sequence: TokenSequence) -> None:
        self._front.appendleft(sequence)

    def take(self) -> TokenSequence:
        """Removes and returns the first output."""
        if self._front:
            return self._front.popleft()
        if self._last in self._turns:
            self._turns.move_to_end(self._last)
        self._last = next(iter(self._turns))
        sequence = self._turns[self._last].popleft()
        self._drop_if_empty(self._last)
        return sequence

    def discard(self, sequence: TokenSequence) -> None:
        """Removes an output, if it is there."""
        number = sequence.handle.number
        for waiting in (self._front, self._turns.get(number)):
            if waiting and sequence in waiting:
                waiting.remove(sequence)
        self._drop_if_empty(number)

    def _drop_if_empty(self, number: int) -> None:
        if not self._turns.get(number, True):
            del self._turns[number]
