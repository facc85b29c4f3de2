# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: sequences join and leave between steps, prompts are read in chunks between them."""

from __future__ import annotations

import heapq
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from time import perf_counter
from typing import Any

from speccompile.core.proposer import Proposer
from speccompile.core.protocols import DeviceLost, Engine
from speccompile.runtime.control import Planner
from speccompile.runtime.draft_report import DraftReport, report_from_planner
from speccompile.runtime.loop import read_chunk, run_step
from speccompile.runtime.requests import FAULTS, NotFinite, StepOutput, text_from_fault
from speccompile.runtime.sequences import RequestHandle, SequenceBatch, TokenSequence
from speccompile.runtime.slot_allocator import EVERY, MIN_SHARED, FairQueue, SlotAllocator, ViewKeeper
from speccompile.runtime.stats import Counters
from speccompile.runtime.verifier import Verifier

Event = tuple[RequestHandle, StepOutput]
_STEP_OUTPUT = itemgetter(1)
_log = logging.getLogger(__name__)


class Scheduler:
    """Decodes sequences, step by step. Used on one thread, as the only user of the engines.

    `lost` is why the engines cannot be used any more; all sequences have ended then.

    Args:
        prefill_chunk: prompt tokens read between two decoding steps.
        keep_prefixes: reuse caches for prompts with the same prefix, those of ended sequences and of active ones.
        reset: frees and zeroes the caches after a fault, which ends the active sequences; None: faults are raised.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        verifier: Verifier,
        proposer: Proposer,
        batch: SequenceBatch,
        engines: Sequence[Engine] = (),
        planner: Planner | None = None,
        *,
        prefill_chunk: int = sys.maxsize,
        keep_prefixes: bool = False,
        reset: Callable[[], object] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.verifier, self.proposer, self.batch, self.engines = verifier, proposer, batch, tuple(engines)
        self.planner, self.prefill_chunk = planner, prefill_chunk
        self.queue = FairQueue()
        self.allocator = SlotAllocator(verifier, proposer, batch, keep_prefixes)
        self.views = ViewKeeper(self.engines, self.allocator, verifier.max_seq_len)
        self.counters = Counters()
        self.num_waiting = 0  # request handles whose sequences all wait for a slot
        self._clock, self._reset = clock, reset
        self.lost: str | None = None
        self._broken: BaseException | None = None
        self._events: list[Event] = []  # made and not yet taken: none is lost where a step raises
        self._last_read: TokenSequence | None = None  # the one whose prompt is being read, or was read last
        self._draft_reads = False  # the prompt that is being read
        self._alone = SequenceBatch((), 1)  # its sequence
        self._handles: dict[int, RequestHandle] = {}  # open ones
        self._marks = {"synthetic_acceptance": list(verifier.rates)} if verifier.rates else {}  # of all stats
        self._deadlines: list[tuple[float, int]] = []  # a heap of (when, number of the request handle)

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended, or the caches must be reset."""
        return bool(self._handles) or self._broken is not None

    def add(self, handle: RequestHandle) -> None:
        """Adds a request handle with its sequences."""
        self._handles[handle.number] = handle
        self.queue.add(handle)
        self.counters.num_requests += 1
        self.num_waiting += 1
        if handle.deadline_s is not None:
            heapq.heappush(self._deadlines, (handle.deadline_s, handle.number))

    def take_events(self) -> list[Event]:
        """Returns the step outputs that were made since the last call, in order."""
        events, self._events = self._events, []
        return events

    def cancel(self, handle: RequestHandle) -> list[Event]:
        """Ends all open sequences of a request handle; none where it has ended already."""
        self._cancel(handle, "cancelled")
        return self.take_events()

    def _cancel(self, handle: RequestHandle, reason: str) -> None:
        for sequence in tuple(handle.open):
            self._end(sequence, reason)

    def cancel_all(self) -> list[Event]:
        """Ends all open sequences."""
        for handle in tuple(self._handles.values()):
            self._cancel(handle, "cancelled")
        return self.take_events()

    def abandon(self, error: str) -> list[Event]:
        """Returns last step outputs of all open sequences, without using the engines: these or a step have failed."""
        handles = tuple(self._handles.values())
        self._handles.clear()
        return self.take_events() + [
            (handle, self._last_output(sequence, "error", error)) for handle in handles for sequence in handle.open
        ]

    def step(self) -> list[Event]:
        """Reads a chunk of prompts and decodes one step; returns the step outputs in order."""
        return self.read() + self.decode()

    def read(self) -> list[Event]:
        """Ends what is overdue and reads a chunk of prompts; returns the step outputs in order."""
        if self._deadlines:
            self._expire()
        if self._broken is not None:
            self._recover(self._broken)
        if len(self.batch.sequences) < self.batch.max_slots:
            self._read_prompts()
        return self.take_events() if self._events else []

    def decode(self) -> list[Event]:
        """Decodes one step of the active sequences; returns the step outputs in order."""
        sequences = tuple(self.batch.sequences)
        if not sequences:
            return []
        try:
            if self.counters.num_steps % EVERY == EVERY - 1:
                self.views.check()
            steps, times = run_step(self.verifier, self.proposer, self.batch, self.engines, self.planner)
        except FAULTS as fault:
            self._restart(fault)
            return self.take_events()
        if self._reset is not None:
            self.counters.count_step(steps, times.step_s)
        self._deliver(sequences, steps)
        if self._broken is not None:
            self._recover(self._broken)
        events, self._events = self._events, []
        return events

    def _recover(self, fault: BaseException) -> None:
        self._broken = None
        self._restart(fault)

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            _, number = heapq.heappop(self._deadlines)
            if number in self._handles:
                self._cancel(self._handles[number], "timeout")

    def _read_prompts(self) -> None:
        left = self.prefill_chunk
        while left > 0:
            try:
                if self.allocator.reading is None:
                    if not self.queue or not self.allocator.has_room:
                        return
                    self._open(self.queue.take())
                left -= self._read(left)
            except FAULTS as fault:
                self._fail(fault)
                return

    def _open(self, sequence: TokenSequence) -> None:
        self._last_read, self._alone = sequence, SequenceBatch.alone(sequence)
        stats, counters = sequence.stats, self.counters
        stats.start_s = stats.end_s = self._clock()
        self._stop_waiting(sequence.handle)
        # A draft that cannot read a prompt later has no part in a sequence for which no drafts are expected.
        self._draft_reads = sequence.has_draft = self._expects_drafts(sequence)
        stats.num_reused = self.allocator.open(sequence)
        sequence.has_draft = self._draft_reads or self.proposer.catches_up
        counters.num_prompts += 1
        counters.num_prompt_tokens += sequence.num_prompt
        counters.num_reused_tokens += stats.num_reused
        counters.num_prefix_hits += stats.num_reused > 0

    def _expects_drafts(self, sequence: TokenSequence) -> bool:
        if not sequence.may_draft or sequence.speculation == "off":
            return False
        # Where drafts are drawn, the text depends on them, so a planner must not decide.
        is_drawn = not (self.batch.is_invariant or sequence.sampling.is_greedy)
        if self.planner is None or is_drawn or sequence.speculation != "auto":
            return True
        return self.planner.expects_drafts(len(self.batch.sequences) + 1)

    def _stop_waiting(self, handle: RequestHandle) -> None:
        self.num_waiting -= handle.is_waiting
        handle.is_waiting = False

    def _read(self, most: int) -> int:
        """Reads at most `most` (at least 1) tokens of the current prompt, its last excluded; returns how many."""
        start_s = self._clock()
        allocator, verifier, sequence = self.allocator, self.verifier, self.allocator.reading
        assert sequence is not None
        self._last_read, stats, slot = sequence, sequence.stats, allocator.reading_slot
        num_last, num, step, fault = sequence.num_prompt - 1, 0, None, None
        if verifier.lengths[slot] < num_last:
            self.proposer.flush()
            chunk = read_chunk(verifier, self.proposer, slot, self._alone, self._draft_reads, most)
            step, fault = chunk.step, chunk.fault
            num = chunk.num - (step is not None)
            if self.planner is not None:
                self.planner.read(num, chunk.draft_s if self._draft_reads else None)
            self.counters.num_prefill_tokens += chunk.num
        stats.end_s = self._clock()
        stats.prefill_s += stats.end_s - start_s
        if fault is None and verifier.lengths[slot] >= num_last and (step is None or step.finish_reason is None):
            allocator.join()
        if step is not None:
            self.counters.num_tokens += len(step.tokens)
            self._deliver([sequence], [step])
        if fault is not None:
            raise fault
        return num

    def _fail(self, fault: BaseException) -> None:
        if not isinstance(fault, NotFinite):
            self._count_fault(fault)
            self.allocator.kept.clear()  # caches may be incompletely moved
        if isinstance(fault, DeviceLost):
            self._lose(fault)
            return
        sequence, self._last_read = self._last_read, None
        if sequence is not None:
            self._end(sequence, "error", text_from_fault(fault))

    def _count_fault(self, fault: BaseException) -> None:
        if self._reset is None:
            raise fault
        self.counters.num_engine_faults += 1

    def _deliver(self, sequences: Sequence[TokenSequence], steps: Sequence[StepOutput]) -> None:
        now_s, ended = self._clock(), []
        for sequence, step in zip(sequences, steps, strict=True):
            stats = sequence.stats
            stats.last_s = now_s
            if stats.first_s is None:
                stats.first_s, stats.num_in_first = now_s, len(step.tokens)
            if step.finish_reason is not None:
                step = step._replace(stats=self._stats(sequence, now_s))
                ended.append((sequence, step))
            self._events.append((sequence.handle, step))
        for sequence, step in reversed(ended):
            self._close(sequence, step)

    def _restart(self, fault: BaseException) -> None:
        """Resets the caches after a step failed: active sequences end, and a prompt half read starts again."""
        self._count_fault(fault)
        if isinstance(fault, DeviceLost):
            self._lose(fault)
            return
        error = text_from_fault(fault)
        _log.warning("a step failed, %d sequences end and the caches are reset: %s", len(self.allocator.active), error)
        for sequence in reversed(tuple(self.allocator.active)):
            self._end(sequence, "error", error)
        reading = self.allocator.reading
        self.allocator.clear()
        if reading is not None:
            self.queue.put_back(reading)
        assert self._reset is not None
        try:
            self._reset()
        except FAULTS as other:
            self._lose(other)

    def _lose(self, fault: BaseException) -> None:
        self.lost, self._broken = text_from_fault(fault), None
        _log.error("the engine cannot be used any more, all requests end: %s", self.lost)
        self.allocator.clear()
        self.queue = FairQueue()
        self._events = self.abandon(self.lost)

    def _end(self, sequence: TokenSequence, reason: str, error: str | None = None) -> None:
        step = self._last_output(sequence, reason, error)
        self._events.append((sequence.handle, step))
        self._close(sequence, step)

    def _last_output(self, sequence: TokenSequence, reason: str, error: str | None) -> StepOutput:
        sequence.error, stats = error, self._stats(sequence, self._clock())
        return StepOutput(sequence.index, sequence.text_left(), [], finish_reason=reason, stats=stats, error=error)

    def _stats(self, sequence: TokenSequence, now_s: float) -> dict[str, Any]:
        stats = sequence.stats.json_of_request(sequence.num_prompt, sequence.handle.submitted_s, now_s)
        return stats | self._marks

    def _close(self, sequence: TokenSequence, step: StepOutput) -> None:
        """Frees what a sequence holds, and counts it."""
        handle = sequence.handle
        handle.open.remove(sequence)
        if sequence is self.allocator.reading or sequence in self.allocator.active:
            try:
                self.allocator.leave(sequence, step.finish_reason != "error" and self._is_worth_keeping(sequence))
            except FAULTS as fault:
                self._broken = fault
        else:  # one that was taken out and has no slot yet is not in the queue either
            self.queue.discard(sequence)
        if not handle.open:
            del self._handles[handle.number]
            self._stop_waiting(handle)
        assert step.finish_reason is not None and step.stats is not None
        request_ms = (self._clock() - handle.submitted_s) * 1e3
        self.counters.count_end(step.finish_reason, step.stats, request_ms, sequence.stats.outcomes)

    def _is_worth_keeping(self, sequence: TokenSequence) -> bool:
        if not self.allocator.keeps:
            return False
        room = self.allocator.max_slots - len(self.allocator.active) + 1
        if len(self.queue) < room:
            return True
        start = sequence.keys[:MIN_SHARED]
        return any(waiting.keys[:MIN_SHARED] == start for waiting in islice(self.queue, room))

    def draft_report(self, asked: str = "auto") -> DraftReport:
        """Returns whether requests with this `speculation` draft now, and why."""
        counters = self.counters
        return report_from_planner(self.planner, counters.num_draft_tokens, counters.num_accepted, asked)

    def json_from_scheduler(self) -> dict[str, Any]:
        """Returns counters, gauges and the planner's decisions."""
        return {
            **self.counters.json_from_counters(),
            "num_queued": len(self.queue),
            "num_prefilling": int(self.allocator.reading is not None),
            "num_active": len(self.allocator.active),
            "num_kept": len(self.allocator.kept),
            "num_slots": self.allocator.max_slots,
            "num_view_shrinks": self.views.num_shrinks,
            "num_kept_dropped_for_views": self.views.num_dropped,
            "graph_faults": {e.spec.name: e.graph_fault for e in self.engines if e.graph_fault},
            "controller": {} if self.planner is None else self.planner.decisions(),
            **self._marks,
        }


def decode(
    verifier: Verifier,
    proposer: Proposer,
    batch: SequenceBatch,
    engines: Sequence[Engine] = (),
    planner: Planner | None = None,
) -> Iterator[list[StepOutput]]:
    """Decodes `batch.waiting` to their ends: the scheduler, driven until it has no work. Yields step outputs by slot.

    A caller may stop iterating at any time without cleaning up: the next run starts with empty lengths.
    """
    scheduler, now_s = Scheduler(verifier, proposer, batch, engines, planner), perf_counter()
    for number, sequence in enumerate(batch.waiting):
        handle = RequestHandle(number, now_s)
        handle.add(sequence)
        scheduler.add(handle)
    while scheduler.has_work:
        if events := scheduler.read():
            yield list(map(_STEP_OUTPUT, events))
        if events := scheduler.decode():
            yield list(map(_STEP_OUTPUT, events))
