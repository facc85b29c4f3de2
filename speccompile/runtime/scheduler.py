# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: sequences join and leave between steps, prompts are read in chunks between them."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np

from speccompile.core.acceptance import Verdict
from speccompile.core.protocols import DeviceLost
from speccompile.core.tree import TokenTree
from speccompile.runtime.control import FixedLength, Planner
from speccompile.runtime.counters import Counters
from speccompile.runtime.draft_report import DraftReport, report_from_planner
from speccompile.runtime.fair_queue import FairQueue
from speccompile.runtime.faults import FAULTS, NotFinite, text_from_fault
from speccompile.runtime.handles import RequestHandle, RequestOutput, trace_step
from speccompile.runtime.loop import Round, needs_draft, run_step
from speccompile.runtime.prefixes import MIN_SHARED
from speccompile.runtime.prompts import read_chunk
from speccompile.runtime.requests import StepOutput
from speccompile.runtime.sequences import SequenceBatch, Step
from speccompile.runtime.slot_allocator import SlotAllocator
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.runtime.views import ViewKeeper

Event = tuple[RequestHandle, StepOutput]
_log = logging.getLogger(__name__)


class Scheduler:
    """Decodes request handles, step by step. Used on one thread, as the only user of the engine.

    Args:
        prefill_chunk: prompt tokens read between two decoding steps.
        keep_prefixes: reuse caches for prompts with the same prefix, those of ended requests and those of active ones.
        clock: monotonic, in seconds.

    Attributes:
        lost: why the engine cannot be used any more; all outputs have ended then.
    """

    def __init__(
        self,
        engine: SpecEngine,
        planner: Planner | None = None,
        prefill_chunk: int = 128,
        keep_prefixes: bool = True,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.engine, self.planner, self.prefill_chunk = engine, planner or FixedLength(), prefill_chunk
        self.queue = FairQueue()
        # Drafts are deterministic and the target's draws decide, so a text depends neither on other requests nor on the
        # planner.
        self.batch = SequenceBatch((), engine.context.max_slots, True, engine.context.max_draft_nodes)
        self.allocator = SlotAllocator(engine.verifier, engine.proposer, self.batch, keep_prefixes)
        self.views = ViewKeeper(engine.engines, self.allocator, engine.context.max_seq_len)
        self.counters = Counters()
        self.num_waiting = 0  # request handles whose outputs all wait for a slot
        self._clock = clock
        self.lost: str | None = None
        self._broken: BaseException | None = None
        self._events: list[Event] = []  # made and not yet taken: none is lost where a step raises
        self._last_read: RequestOutput | None = None  # the one whose prompt is being read, or was read last
        self._draft_reads = False  # the prompt that is being read
        self._alone = SequenceBatch((), 1)  # its sequence
        self._handles: dict[int, RequestHandle] = {}  # open ones
        self._deadlines: list[tuple[float, int]] = []  # a heap of (when, number of the request handle)
        engine.reset()

    @property
    def has_work(self) -> bool:
        return bool(self._handles) or self._broken is not None

    def add(self, handle: RequestHandle) -> None:
        """Adds a request handle with its outputs."""
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
        """Ends all open outputs of a request handle; none where it has ended already."""
        self._cancel(handle, "cancelled")
        return self.take_events()

    def _cancel(self, handle: RequestHandle, reason: str) -> None:
        for output in tuple(handle.open):
            self._end(output, reason)

    def cancel_all(self) -> list[Event]:
        for handle in tuple(self._handles.values()):
            self._cancel(handle, "cancelled")
        return self.take_events()

    def abandon(self, error: str) -> list[Event]:
        """Returns last step outputs of all open outputs, without using the engine: it or the scheduler has failed."""
        handles, now_s = tuple(self._handles.values()), self._clock()
        self._handles.clear()
        return self.take_events() + [
            (handle, output.last_step_output("error", now_s, error)) for handle in handles for output in handle.open
        ]

    def step(self) -> list[Event]:
        """Reads a chunk of prompts and decodes one step; returns the step outputs in order."""
        self._expire()
        self._recover()
        self._read_prompts()
        if self.allocator.active:
            self._decode()
        self._recover()
        return self.take_events()

    def _recover(self) -> None:
        fault, self._broken = self._broken, None
        if fault is not None:
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

    def _open(self, output: RequestOutput) -> None:
        self._last_read, self._alone = output, SequenceBatch.alone(output.sequence)
        output.started_s = output.sequence.stats.start_s = output.sequence.stats.end_s = self._clock()
        self._stop_waiting(output.handle)
        self._draft_reads = needs_draft(self.engine.proposer, self.planner, self.batch, output.sequence)
        output.num_reused = self.allocator.open(output)
        counters = self.counters
        counters.num_prompts += 1
        counters.num_prompt_tokens += output.sequence.num_prompt
        counters.num_reused_tokens += output.num_reused
        counters.num_prefix_hits += output.num_reused > 0

    def _stop_waiting(self, handle: RequestHandle) -> None:
        self.num_waiting -= handle.is_waiting
        handle.is_waiting = False

    def _read(self, most: int) -> int:
        """Reads at most `most` (at least 1) tokens of the current prompt, its last one not counted.

        Returns:
            How many were read.
        """
        start_s = self._clock()
        allocator, verifier, proposer = self.allocator, self.engine.verifier, self.engine.proposer
        output, slot = allocator.reading, allocator.reading_slot
        assert output is not None
        self._last_read, sequence, alone = output, output.sequence, self._alone
        num_last, num, chunk = sequence.num_prompt - 1, 0, None
        if verifier.lengths[slot] < num_last:
            proposer.flush()
            chunk = read_chunk(verifier, proposer, slot, alone, self._draft_reads, most, is_checked=True)
            num = chunk.num - (chunk.step is not None)
            self.planner.read(num, chunk.draft_s if self._draft_reads else None)
            self.counters.num_prefill_tokens += chunk.num
        sequence.stats.end_s = self._clock()
        sequence.stats.prefill_s += sequence.stats.end_s - start_s
        step = None if chunk is None else chunk.step
        if verifier.lengths[slot] >= num_last and (step is None or step.finish_reason is None):
            allocator.join()
        if step is not None and chunk is not None:
            self._deliver_first(output, step, chunk.verdict)
        return num

    def _deliver_first(self, output: RequestOutput, step: Step, verdict: Verdict | None) -> None:
        self.counters.num_tokens += len(step.tokens)
        wants = output.request.wants_trace and step.finish_reason != "error"
        root = TokenTree.chain(np.array([[output.sequence.tokens[output.sequence.num_prompt - 1]]], dtype=np.int64))
        trace = trace_step(self.engine.tokenizer, root, verdict, 0) if wants and verdict is not None else None
        step_output = output.step_output(step, self._clock(), trace)
        self._events.append((output.handle, step_output))
        if step.finish_reason is not None:
            self._close(output, step_output)

    def _fail(self, fault: BaseException) -> None:
        if not isinstance(fault, NotFinite):
            self.counters.num_engine_faults += 1
            self.allocator.kept.clear()  # caches may be incompletely moved
        if isinstance(fault, DeviceLost):
            self._lose(fault)
            return
        output, self._last_read = self._last_read, None
        if output is not None:
            self._end(output, "error", text_from_fault(fault))

    def _decode(self) -> None:
        engine, batch, start_s = self.engine, self.batch, perf_counter()
        decoding = tuple(self.allocator.active)
        sequences = tuple(batch.sequences)
        try:
            limit = self.planner.plan(sequences)
            round_ = run_step(engine.verifier, engine.proposer, batch, engine.engines, limit)
        except FAULTS as fault:
            self._restart(fault)
            return
        self.counters.count_step(round_.steps, round_.times.step_s)
        self._deliver(decoding, round_)
        try:
            self.views.after_step()
        except FAULTS as fault:
            self._restart(fault)
            return
        if self.planner.num_rests:
            self.planner.rested(sequences, 1, perf_counter() - start_s)
            return
        engine.proposer.observe(round_.tree.batch, round_.tree.nodes, round_.times)
        times = round_.times._replace(step_s=perf_counter() - start_s)
        self.planner.observe(sequences, round_.steps, times)

    def _deliver(self, decoding: tuple[RequestOutput, ...], round_: Round) -> None:
        events, now_s = [], self._clock()
        for slot, (output, step) in enumerate(zip(decoding, round_.steps, strict=True)):
            wants = output.request.wants_trace and step.finish_reason != "error"
            trace = trace_step(self.engine.tokenizer, round_.tree, round_.verdict, slot) if wants else None
            events.append((output.handle, output.step_output(step, now_s, trace)))
        self._events += events
        for slot in reversed(range(len(decoding))):
            step_output = events[slot][1]
            if step_output.finish_reason is not None:
                self._close(decoding[slot], step_output)

    def _restart(self, fault: BaseException) -> None:
        """Resets the caches after a step failed: active outputs end, and a prompt that was being read starts again."""
        self.counters.num_engine_faults += 1
        if isinstance(fault, DeviceLost):
            self._lose(fault)
            return
        error = text_from_fault(fault)
        _log.warning("a step failed, %d sequences end and the caches are reset: %s", len(self.allocator.active), error)
        for output in reversed(tuple(self.allocator.active)):
            self._end(output, "error", error)
        reading = self.allocator.reading
        self.allocator.clear()
        if reading is not None:
            self.queue.put_back(reading)
        try:
            self.engine.reset(clears=True)
        except FAULTS as other:
            self._lose(other)

    def _lose(self, fault: BaseException) -> None:
        self.lost, self._broken = text_from_fault(fault), None
        _log.error("the engine cannot be used any more, all requests end: %s", self.lost)
        self.allocator.clear()
        self.queue = FairQueue()
        self._events = self.abandon(self.lost)

    def _end(self, output: RequestOutput, reason: str, error: str | None = None) -> None:
        step_output = output.last_step_output(reason, self._clock(), error)
        self._events.append((output.handle, step_output))
        self._close(output, step_output)

    def _close(self, output: RequestOutput, step_output: StepOutput) -> None:
        """Frees what an output holds, and counts it."""
        handle = output.handle
        handle.open.remove(output)
        if output is self.allocator.reading or output in self.allocator.active:
            try:
                self.allocator.leave(output, keeps=step_output.finish_reason != "error" and self._may_be_reused(output))
            except FAULTS as fault:
                self._broken = fault
        else:  # one that was taken out and has no slot yet is not in the queue either
            self.queue.discard(output)
        if not handle.open:
            del self._handles[handle.number]
            self._stop_waiting(handle)
        assert step_output.finish_reason is not None and step_output.stats is not None
        request_ms = (self._clock() - handle.submitted_s) * 1e3
        self.counters.count_end(
            step_output.finish_reason, step_output.stats, request_ms, output.sequence.stats.outcomes
        )

    def _may_be_reused(self, output: RequestOutput) -> bool:
        room = self.allocator.max_slots - len(self.allocator.active) + 1
        if len(self.queue) < room:
            return True
        start = output.sequence.keys[:MIN_SHARED]
        return any(waiting.sequence.keys[:MIN_SHARED] == start for waiting in islice(self.queue, room))

    def draft_report(self, asked: str = "auto") -> DraftReport:
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
            "graph_faults": {e.spec.name: e.graph_fault for e in self.engine.engines if e.graph_fault},
            "controller": self.planner.decisions(),
        }
