# SPDX-License-Identifier: Apache-2.0
"""Who sits where: places 0 .. active - 1 decode, one behind them reads its prompt, others keep caches or are free."""

from __future__ import annotations

from speccompile.core.protocols import Proposer
from speccompile.runtime.handles import RequestOutput
from speccompile.runtime.prefixes import MIN_SHARED, Kept, best_match
from speccompile.runtime.slots import Slots
from speccompile.runtime.verifier import Verifier


class SlotAllocator:
    """The places of an engine.

    Steps run over a contiguous range of places, so a sequence that ends changes places with the last one that
    decodes, and a prompt is read where its sequence will decode: at the first place behind these.

    Args:
        verifier: the target.
        proposer: the drafts.
        slots: what the loop's steps are given; kept in accord with `active`.
        keeps: keep the caches of those that leave, and share those that begin as a new prompt does.
    """

    def __init__(self, verifier: Verifier, proposer: Proposer, slots: Slots, keeps: bool = True) -> None:
        self.verifier, self.proposer, self.slots, self.keeps = verifier, proposer, slots, keeps
        self.caches = (verifier.cache, *proposer.caches)
        self.max_places = slots.max_slots
        self.active: list[RequestOutput] = []
        self.reading: RequestOutput | None = None
        self.reading_place = 0
        self.kept = Kept()

    @property
    def has_room(self) -> bool:
        """Whether a prompt could begin to be read."""
        return self.reading is None and len(self.active) < self.max_places

    def open(self, output: RequestOutput) -> int:
        """Give a place to an output whose prompt is to be read.

        Returns:
            How many tokens of the prompt are in the place's caches already.
        """
        front, prompt = len(self.active), output.slot.tokens
        source, num = best_match(prompt, self._held()) if self.keeps else (-1, 0)
        self.reading, self.reading_place = output, front
        if self._may_take(source, num):
            self._bring(source, front)
            self.kept.drop(front)
        else:
            source = self._vacate(front, source)
            if source >= 0:
                if source in self.kept:
                    self.kept.use(source)
                for cache in self.caches:
                    cache.copy(source, front, num)
        if num:
            num = self.proposer.resume(front, output.slot, num)
        else:
            self.proposer.start(front, output.slot)
        self.verifier.lengths[front] = num
        return num

    def _held(self) -> list[tuple[int, list[int]]]:
        """Places with the tokens in the target's cache: kept ones first, as they can be taken over."""
        lengths = self.verifier.lengths
        decoding = [(place, output.slot.tokens[: lengths[place]]) for place, output in enumerate(self.active)]
        return [*self.kept.items(), *decoding]

    def _may_take(self, source: int, num: int) -> bool:
        """Whether a cache is better taken over than copied: little of it would be lost, or it would go anyway."""
        if source not in self.kept:
            return False
        lost = int(self.verifier.lengths[source]) - num
        return lost < MIN_SHARED or (self._free_place() < 0 and self.kept.oldest() == source)

    def _free_place(self) -> int:
        """The last free place; -1: there is none."""
        places = range(self.max_places - 1, len(self.active) - 1, -1)
        return next((place for place in places if place not in self.kept), -1)

    def _bring(self, source: int, dest: int) -> None:
        """Move a kept cache; one that is kept at `dest` changes places with it."""
        if source == dest:
            return
        if dest in self.kept:
            self._swap(source, dest)
            self.kept.rename(dest, -1)
            self.kept.rename(source, dest)
            self.kept.rename(-1, source)
        else:
            self._move(source, dest)
            self.kept.rename(source, dest)

    def _vacate(self, place: int, source: int) -> int:
        """Free a place; what it keeps goes to a free one, or to that of the oldest, which is given up.

        Args:
            place: to be freed.
            source: of rows that are to be copied.

        Returns:
            Where `source` is then.
        """
        if place not in self.kept:
            return source
        dest = self._free_place()
        if dest < 0:
            dest = self.kept.oldest()  # not `source`: that would have been taken over
            self.kept.drop(dest)
        if dest != place:
            self._move(place, dest)
            self.kept.rename(place, dest)
        return dest if source == place else source

    def join(self) -> None:
        """The prompt is read: decode from the next step on."""
        output, place = self.reading, len(self.active)
        assert output is not None
        if place in self.kept:  # somebody has left since
            self._swap(self.reading_place, place)
            self.kept.rename(place, self.reading_place)
        else:
            self._move(self.reading_place, place)
        self.reading = None
        self.active.append(output)
        self.slots.slots.append(output.slot)
        self.slots.changed()

    def leave(self, output: RequestOutput, keeps: bool = True) -> None:
        """Free the place of an output that decodes or reads.

        Args:
            output: the one that leaves.
            keeps: keep its cache, if that is worth it; not where a step has failed.
        """
        if output is self.reading:
            self.reading = None
            self._keep(self.reading_place, output, keeps)
            return
        place, last = self.active.index(output), len(self.active) - 1
        self.active[place], self.slots.slots[place] = self.active[last], self.slots.slots[last]
        self.active.pop()
        self.slots.slots.pop()
        self.slots.changed()
        if place == last:
            self._keep(last, output, keeps)
        elif keeps and self._is_worth(place, output):
            self._swap(place, last)
            self._keep(last, output, keeps)
        else:
            self._move(last, place)

    def _is_worth(self, place: int, output: RequestOutput) -> bool:
        return self.keeps and min(int(self.verifier.lengths[place]), len(output.slot.tokens)) >= MIN_SHARED

    def _keep(self, place: int, output: RequestOutput, keeps: bool) -> None:
        """Keep the rows of the tokens that the output showed; a cut text has fewer than its last step had rows."""
        if keeps and self._is_worth(place, output):
            tokens = output.slot.tokens[: int(self.verifier.lengths[place])]
            self.verifier.lengths[place] = len(tokens)
            self.kept.put(place, tokens)

    def clear(self) -> None:
        """Nobody has a place, and nothing is kept."""
        self.active.clear()
        self.slots.slots.clear()
        self.slots.changed()
        self.reading = None
        self.kept.clear()

    def _move(self, source: int, dest: int) -> None:
        if source != dest:
            for cache in self.caches:
                cache.move(source, dest)

    def _swap(self, first: int, second: int) -> None:
        for cache in self.caches:
            cache.swap(first, second)
