# SPDX-License-Identifier: Apache-2.0
"""The outputs that wait for a slot: requests take turns, whatever number of outputs each of them has."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain, zip_longest

from speccompile.runtime.handles import RequestHandle, RequestOutput


class FairQueue:
    """One output of each waiting request after another, in the order in which the requests came.

    A request that has just had its turn goes after all others only when the next turn comes, so that one that arrives
    in between is before it.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[int, deque[RequestOutput]] = OrderedDict()  # by number of the request handle
        self._front: deque[RequestOutput] = deque()  # out of turn
        self._last = -1  # whose turn was last: it is the first of `_turns` where it has outputs left

    def __len__(self) -> int:
        return len(self._front) + sum(map(len, self._turns.values()))

    def __bool__(self) -> bool:
        return bool(self._front or self._turns)

    def __iter__(self) -> Iterator[RequestOutput]:
        """Returns the outputs in the order in which they would be taken."""
        turns = list(self._turns.values())
        start = int(self._last in self._turns)
        rounds = zip_longest(*turns[start:], *turns[:start])
        return chain(self._front, (output for turn in rounds for output in turn if output is not None))

    def add(self, handle: RequestHandle) -> None:
        self._turns[handle.number] = deque(handle.open)

    def put_back(self, output: RequestOutput) -> None:
        self._front.appendleft(output)

    def take(self) -> RequestOutput:
        """Removes and returns the first output."""
        if self._front:
            return self._front.popleft()
        if self._last in self._turns:
            self._turns.move_to_end(self._last)
        self._last = next(iter(self._turns))
        output = self._turns[self._last].popleft()
        self._drop_if_empty(self._last)
        return output

    def discard(self, output: RequestOutput) -> None:
        """Removes an output, if it is there."""
        number = output.handle.number
        for outputs in (self._front, self._turns.get(number)):
            if outputs and output in outputs:
                outputs.remove(output)
        self._drop_if_empty(number)

    def _drop_if_empty(self, number: int) -> None:
        if not self._turns.get(number, True):
            del self._turns[number]
