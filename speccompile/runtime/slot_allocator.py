# SPDX-License-Identifier: Apache-2.0
"""Queues sequences, assigns slots to them, and keeps the caches of ended ones for prompts with the same prefix."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest

from speccompile.backends.feeds import bucket_rows
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Engine
from speccompile.runtime.sequences import RequestHandle, SequenceBatch, TokenSequence
from speccompile.runtime.verifier import Verifier

MIN_SHARED = 16  # tokens; reading fewer is as fast as moving a cache
_BLOCK = 64  # tokens compared at once: slices of lists compare fast


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the common prefix of two sequences."""
    most = min(len(first), len(second))
    for start in range(0, most, _BLOCK):
        end = min(start + _BLOCK, most)
        if first[start:end] != second[start:end]:
            return next(i for i in range(start, end) if first[i] != second[i])
    return most


def best_match(
    prompt: Sequence[int],
    held: Iterable[tuple[int, Sequence[int]]],
    reusable: Callable[[int, int], int] = lambda slot, num: num,
) -> tuple[int, int]:
    """Returns the slot that shares the longest prefix with a prompt, and its length; (-1, 0): none of `MIN_SHARED`.

    The prompt's last two tokens are never shared: the root is not in a cache, and the state of the token before it must
    be computed.

    Args:
        reusable: of a slot and a number of its first tokens: how many of them a sequence can go on from.
    """
    best, most, start = -1, MIN_SHARED - 1, prompt[:MIN_SHARED]
    for slot, tokens in held:
        if tokens[:MIN_SHARED] == start:
            num = reusable(slot, min(num_shared(prompt, tokens), len(prompt) - 2))
            if num > most:
                best, most = slot, num
    return (best, most) if best >= 0 else (-1, 0)


class FairQueue:
    """One output of each waiting request in turn, in the order in which the requests came.

    A request goes after the others only when the next turn comes, so that one that arrives in between is before it.
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


class Kept:
    """Caches of finished requests by slot, the least recently used first."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}  # in the order of their last use

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, slot: int) -> bool:
        return slot in self._tokens

    def items(self) -> Iterable[tuple[int, list[int]]]:
        """Returns slot indices with the tokens whose rows are in the target's cache."""
        return self._tokens.items()

    def put(self, slot: int, tokens: list[int]) -> None:
        self._tokens[slot] = tokens

    def drop(self, slot: int) -> list[int]:
        return self._tokens.pop(slot)

    def use(self, slot: int) -> None:
        self._tokens[slot] = self._tokens.pop(slot)

    def rename(self, source: int, dest: int) -> None:
        """Records that the cache of slot `source` was moved to `dest`; its age stays the same."""
        self._tokens = {dest if slot == source else slot: tokens for slot, tokens in self._tokens.items()}

    def oldest(self) -> int:
        return next(iter(self._tokens))

    def clear(self) -> None:
        self._tokens.clear()


class SlotAllocator:
    """Assigns the slots of an engine to sequences, and moves caches between slots.

    Slots 0 .. active - 1 decode, the next one reads its prompt, others keep caches or are free. Steps run over a
    contiguous range, so a sequence that ends swaps slots with the last one that decodes.

    Args:
        keeps: keep the caches of sequences that leave, and reuse those with the same prefix as a new prompt.
    """

    def __init__(self, verifier: Verifier, proposer: Proposer, batch: SequenceBatch, keeps: bool = True) -> None:
        self.verifier, self.proposer, self.batch, self.keeps = verifier, proposer, batch, keeps
        self.caches = (verifier.cache, *proposer.caches)
        self.max_slots = batch.max_slots
        self.active = batch.sequences
        self.reading: TokenSequence | None = None
        self.reading_slot = 0
        self.kept = Kept()

    @property
    def has_room(self) -> bool:
        return self.reading is None and len(self.active) < self.max_slots

    def open(self, sequence: TokenSequence) -> int:
        """Gives a slot to a sequence with a prompt to read; returns how many of its tokens the caches have."""
        front, prompt = len(self.active), sequence.keys
        rows = self.verifier.cache
        source, num = (-1, 0)
        if self.keeps and sequence.sampling.prompt_logprobs is None:  # logits are not kept
            source, num = best_match(prompt, self._held(), rows.reusable)
        self.reading, self.reading_slot = sequence, front
        if self._may_take(source, num):
            self._move_kept(source, front)
            self.kept.drop(front)
        else:
            source = self._vacate(front, source)
            if source >= 0:
                if source in self.kept:
                    self.kept.use(source)
                for cache in self.caches:
                    cache.copy(source, front, num)
        num = self._resume(front, sequence, num)
        rows.resume(front, num)
        return num

    def _resume(self, slot: int, sequence: TokenSequence, num: int) -> int:
        """Starts the drafts of a sequence; returns how many of its `num` cached tokens need not be read again."""
        while num and (sequence.has_draft or self.proposer.catches_up):
            wanted = self.proposer.resume(slot, sequence, num)
            num = self.verifier.cache.reusable(slot, wanted)
            if num == wanted:
                return num
        self.proposer.start(slot, sequence)
        return num

    def _held(self) -> list[tuple[int, list[int]]]:
        """Returns slot indices with the tokens in the target's cache, preferred first: old ones may lack draft rows."""
        lengths = self.verifier.lengths
        decoding = [(slot, sequence.keys[: lengths[slot]]) for slot, sequence in enumerate(self.active)]
        return [*reversed(list(self.kept.items())), *decoding]

    def _may_take(self, source: int, num: int) -> bool:
        if source not in self.kept:
            return False
        lost = int(self.verifier.lengths[source]) - num
        return lost < MIN_SHARED or (self._free_slot() < 0 and self.kept.oldest() == source)

    def _free_slot(self) -> int:
        slots = range(self.max_slots - 1, len(self.active) - 1, -1)
        return next((slot for slot in slots if slot not in self.kept), -1)

    def _move_kept(self, source: int, dest: int) -> None:
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

    def _vacate(self, slot: int, source: int) -> int:
        """Frees a slot; its kept cache replaces the oldest one. Returns where the rows of `source` are then."""
        if slot not in self.kept:
            return source
        dest = self._free_slot()
        if dest < 0:
            dest = self.kept.oldest()  # not `source`: that would have been taken over
            self.kept.drop(dest)
        if dest != slot:
            self._move(slot, dest)
            self.kept.rename(slot, dest)
        return dest if source == slot else source

    def join(self) -> None:
        """Adds the sequence whose prompt is read to those that decode."""
        sequence, slot = self.reading, len(self.active)
        assert sequence is not None
        if slot in self.kept:  # a sequence has left since the prompt was opened
            self._swap(self.reading_slot, slot)
            self.kept.rename(slot, self.reading_slot)
        else:
            self._move(self.reading_slot, slot)
        if self.keeps:
            self.verifier.cache.take_snapshot(slot)
        self.reading = None
        self.active.append(sequence)
        self.batch.changed()

    def leave(self, sequence: TokenSequence, keeps: bool = True) -> None:
        """Frees the slot of a sequence that decodes or reads its prompt.

        Args:
            keeps: keep its cache if it has enough tokens; False where a step has failed.
        """
        if sequence is self.reading:
            self.reading = None
            self._keep(self.reading_slot, sequence, keeps)
            return
        slot, last = self.active.index(sequence), len(self.active) - 1
        self.active[slot] = self.active[last]
        self.active.pop()
        self.batch.changed()
        if slot == last:
            self._keep(last, sequence, keeps)
        elif keeps and self._is_long_enough(slot, sequence):
            self._swap(slot, last)
            self._keep(last, sequence, keeps)
        else:
            self._move(last, slot)

    def _is_long_enough(self, slot: int, sequence: TokenSequence) -> bool:
        return self.keeps and min(int(self.verifier.lengths[slot]), len(sequence.tokens)) >= MIN_SHARED

    def _keep(self, slot: int, sequence: TokenSequence, keeps: bool) -> None:
        if keeps and self._is_long_enough(slot, sequence):
            tokens = sequence.keys[: int(self.verifier.lengths[slot])]
            self.verifier.lengths[slot] = len(tokens)
            self.kept.put(slot, tokens)

    def clear(self) -> None:
        """Frees all slots and drops all kept caches."""
        self.active.clear()
        self.batch.changed()
        self.reading = None
        self.kept.clear()

    def _move(self, source: int, dest: int) -> None:
        if source != dest:
            for cache in self.caches:
                cache.move(source, dest)

    def _swap(self, first: int, second: int) -> None:
        for cache in self.caches:
            cache.swap(first, second)


EVERY = 16  # steps between two checks
HEADROOM = 128  # rows that sequences may grow by before the view must grow again
ROW_PRICE = 1000  # cache rows that attention reads in the time of one prompt token, roughly
COPIES = 4  # shrinking a view and growing it again reads and writes it twice


class ViewKeeper:
    """Shrinks views where that saves time; `max_rows` are the cache rows that a sequence may use.

    Views shrink once the summed cost of excess rows reaches the cost of shrinking and of reading again the kept caches
    that are too long. So at most twice the least possible time is lost.
    """

    def __init__(self, engines: Sequence[Engine], allocator: SlotAllocator, max_rows: int) -> None:
        self.engines, self.allocator, self.max_rows = tuple(engines), allocator, max_rows
        self.num_shrinks = self.num_dropped = 0
        self._wasted = 0

    def check(self) -> None:
        """Checks the views, once in `EVERY` steps."""
        allocator, view = self.allocator, max((engine.view_rows for engine in self.engines), default=0)
        lengths, num = allocator.verifier.lengths, len(allocator.active)
        used = max(lengths[:num].tolist(), default=0)
        if allocator.reading is not None:
            used = max(used, allocator.reading.num_prompt)
        needed = bucket_rows(used + HEADROOM, self.max_rows)
        if needed >= view or num == 0:
            self._wasted = 0
            return
        self._wasted += EVERY * num * (view - needed)
        too_long = [slot for slot, tokens in allocator.kept.items() if len(tokens) > needed]
        price = COPIES * allocator.max_slots * view + ROW_PRICE * sum(int(lengths[slot]) for slot in too_long)
        if self._wasted < price:
            return
        for slot in too_long:
            allocator.kept.drop(slot)
        for engine in self.engines:
            if engine.view_rows:
                engine.shrink(needed)
        self.num_shrinks += 1
        self.num_dropped += len(too_long)
        self._wasted = 0
