# SPDX-License-Identifier: Apache-2.0
"""A bundle as a service: requests from any thread or event loop, one scheduler thread over one engine."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple, Self

from speccompile.core.sampling_params import StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.runtime.constraint_checker import shutting_down
from speccompile.runtime.control import FixedLength, Planner, controller_of
from speccompile.runtime.draft_report import DraftReport
from speccompile.runtime.requests import (
    FAULTS,
    SPECULATION,
    Busy,
    Generation,
    Request,
    Speculation,
    StepOutput,
    generation_of_steps,
)
from speccompile.runtime.scheduler import Event, Scheduler
from speccompile.runtime.sequences import RequestHandle, SequenceBatch, token_ids
from speccompile.runtime.spec_engine import SpecEngine

JOIN_S = 30.0  # a step that takes longer than this when the service closes is hung


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a service.

    Args:
        max_queue: requests that may wait for a slot; one more is refused.
        timeout_s: of requests that have none of their own; None: no limit.
        prefill_chunk: prompt tokens read between two decoding steps: more reads prompts faster, fewer delay the
            decoding sequences less.
        keep_prefixes: keep the caches of finished requests for later prompts with the same prefix.
        speculation: meaning of a request's `auto`: the controller decides (`auto`), always (`on`), never (`off`).

    Raises:
        RuntimeFault: a value is out of range.
    """

    max_queue: int = 256
    timeout_s: float | None = None
    prefill_chunk: int = 128
    keep_prefixes: bool = True
    speculation: Speculation = "auto"

    def __post_init__(self) -> None:
        timeout = self.timeout_s
        checks: tuple[tuple[str, bool, object, str], ...] = (
            ("max_queue", self.max_queue >= 1, self.max_queue, "at least 1"),
            ("timeout_s", timeout is None or 0 < timeout < float("inf"), timeout, "above 0, or None"),
            ("prefill_chunk", self.prefill_chunk >= 1, self.prefill_chunk, "at least 1"),
            ("speculation", self.speculation in SPECULATION, self.speculation, ", ".join(SPECULATION)),
        )
        for name, is_right, got, expected in checks:
            if not is_right:
                raise RuntimeFault(f"ServiceOptions.{name}", repr(got), expected, "Correct the options.")


class _Add(NamedTuple):
    handle: RequestHandle


class _Cancel(NamedTuple):
    handle: RequestHandle


class _Close(NamedTuple):
    deadline_s: float


class _Report(NamedTuple):
    answer: SimpleQueue[dict[str, Any]]


_Command = _Add | _Cancel | _Close | _Report


class Service:
    """Continuous batching with a queue of requests.

    Every output of every accepted request ends with exactly one step output that has a finish reason.

    Args:
        engine: nothing else may use it as long as the service runs.
        planner: bounds the drafts of each step; None: a new controller.
    """

    def __init__(
        self, engine: SpecEngine, options: ServiceOptions | None = None, planner: Planner | None = None
    ) -> None:
        self.engine, self.options = engine, options or ServiceOptions()
        planner = planner or controller_of(engine.proposer)
        self._scheduler = make_scheduler(engine, planner, self.options.prefill_chunk, self.options.keep_prefixes)
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._lock = threading.Lock()  # over what follows; never held during a step
        self._num_handles = self._num_coming = self._num_busy = 0
        self._is_open = self._is_running = False
        self._fault: str | None = None
        self._on_fault: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the scheduler's thread, once; `with` does, and closes the service at its end."""
        if self._thread is not None:
            raise RuntimeFault("service", "a second start", "one", "Make another service.")
        self._thread = threading.Thread(target=self._serve, name="speccompile-scheduler", daemon=True)
        self._is_open = self._is_running = True
        self._thread.start()

    def close(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, and cancels those that `drain_s` seconds do not finish.

        Raises:
            RuntimeFault: the engine hangs.
        """
        with self._lock:
            self._is_open = False
        self.engine.close_grammars()
        thread = self._thread
        if thread is None:
            return
        self._commands.put(_Close(perf_counter() + drain_s))
        thread.join(drain_s + JOIN_S)
        if thread.is_alive():
            raise RuntimeFault("service", f"a step of more than {JOIN_S} s", "less", "End the process.")

    def end_drain(self) -> None:
        """Cancels the requests that `close` lets finish. May be called on any thread, and in a signal handler."""
        self._commands.put(_Close(perf_counter()))

    def submit(self, request: Request, on_output: Callable[[StepOutput], None], *more: Request) -> RequestHandle:
        """Submits a request, from any thread; returns the handle to cancel it with.

        Args:
            more: others that are accepted with it or not at all, and that wait as one: they have one place in the queue
                and one turn at the slots, and their outputs are numbered after its own. The shortest time-out holds.
            on_output: called with each step output, on the scheduler's thread. It must not block. Where it raises, the
                request is cancelled, without a report.

        Raises:
            RuntimeFault: the request is wrong; see `SpecEngine.generate`.
            Busy: too many requests wait, or the service does not run.
        """
        limits = [self.options.timeout_s if one.timeout_s is None else one.timeout_s for one in (request, *more)]
        timeout_s = min((limit for limit in limits if limit is not None), default=None)
        handle = RequestHandle(0, perf_counter(), timeout_s, on_output)
        open_outputs(handle, (request, *more), self.engine, self.options.speculation)
        with self._lock:
            if not self._is_open:
                got = "a request to a service that does not run" if self._fault is None else self._fault
                raise Busy("service", got, "a running service", "Send the request to another one, or start it again.")
            waiting, most = self._num_coming + self._scheduler.num_waiting, self.options.max_queue
            if waiting >= most:
                self._num_busy += 1
                raise Busy("queue", f"{waiting} waiting requests", f"less than {most}", "Send the request again later.")
            self._num_coming += 1
            self._num_handles += 1
            handle.number = self._num_handles
            self._commands.put(_Add(handle))
        return handle

    async def prepare(self, constraint: StructuredOutputs) -> None:
        """Compiles the constraint of a coming request; cancelling ends the work. Raises as `submit`."""
        if not self._is_open:
            raise shutting_down()
        await self.engine.grammars.prepare(constraint)

    def cancel(self, handle: RequestHandle) -> None:
        """Ends a request's open outputs with `cancelled`. May be called on any thread, at any time, repeatedly."""
        self._commands.put(_Cancel(handle))

    def stream(self, *requests: Request) -> OutputStream:
        """Submits requests in the running event loop; returns an `OutputStream`. Raises as `submit`, for all."""
        return OutputStream(self, requests)

    async def generate(self, request: Request) -> list[Generation]:
        """Returns all outputs of a request, in their order; cancelling the task cancels it. Raises as `submit`."""
        async with self.stream(request) as stream:
            return await stream.generations()

    def stats(self) -> dict[str, Any]:
        """Returns a JSON-ready snapshot (docs/reference/service.md). Any thread; waits for the current step to end."""
        answer: SimpleQueue[dict[str, Any]] = SimpleQueue()
        with self._lock:
            is_running = self._is_running and threading.current_thread() is not self._thread
            if is_running:
                self._commands.put(_Report(answer))
        snapshot = answer.get() if is_running else self._scheduler.json_from_scheduler()
        snapshot["drafts"] = self.draft_report().json_from_report()
        return {**snapshot, "num_busy": self._num_busy, "is_open": self._is_open, "fault": self._fault}

    def draft_report(self, speculation: str = "auto") -> DraftReport:
        """Returns whether requests with this `speculation` draft now, and why. May be called on any thread."""
        return self._scheduler.draft_report(self.options.speculation if speculation == "auto" else speculation)

    def _serve(self) -> None:
        fault: str | None = "a bug in the service"
        try:
            self._run()
            fault = self._scheduler.lost
        finally:
            if (bug := sys.exc_info()[1]) is not None:
                fault = f"a bug in the service: {type(bug).__name__}: {bug}"
            with self._lock:  # no command is added after this
                self._is_open = self._is_running = False
                self._fault = fault
            self._handle(self._next_commands(is_busy=True), is_ending=True)
            self._deliver(self._scheduler.cancel_all() if fault is None else self._scheduler.abandon(fault))
            if fault is not None and self._on_fault is not None:
                self._on_fault()

    def watch(self, on_fault: Callable[[], None]) -> None:
        """Registers a function to call when a bug or a lost device ends the service, which is not started again.

        It is called once, on the scheduler's thread, or at once where the service has ended. It must not raise.
        """
        with self._lock:
            self._on_fault = on_fault
            has_ended = self._fault is not None
        if has_ended:
            on_fault()

    @property
    def fault(self) -> str | None:
        """The bug, or the fault of the device, that ended the service; None: neither did."""
        return self._fault

    def _run(self) -> None:
        end_s: float | None = None
        while True:
            commands = self._next_commands(self._scheduler.has_work or end_s is not None)
            ends = [command.deadline_s for command in commands if isinstance(command, _Close)]
            end_s = min(ends if end_s is None else [*ends, end_s], default=None)  # two may come during one step
            self._deliver(self._handle(commands))
            if end_s is not None and (not self._scheduler.has_work or perf_counter() >= end_s):
                return
            self._deliver(self._scheduler.read())
            self._deliver(self._scheduler.decode())
            if self._scheduler.lost is not None:
                return

    def _next_commands(self, is_busy: bool) -> list[_Command]:
        commands = [] if is_busy else [self._commands.get()]
        try:
            while True:
                commands.append(self._commands.get_nowait())
        except Empty:
            return commands

    def _handle(self, commands: list[_Command], is_ending: bool = False) -> list[Event]:
        events: list[Event] = []
        for command in commands:
            if isinstance(command, _Add):
                with self._lock:
                    self._num_coming -= 1
                    self._scheduler.add(command.handle)
            elif isinstance(command, _Cancel) and not is_ending:
                events += self._scheduler.cancel(command.handle)
            elif isinstance(command, _Report):
                command.answer.put(self._scheduler.json_from_scheduler())
        return events

    def _deliver(self, events: list[Event]) -> None:
        for handle, step_output in events:
            try:
                handle.on_output(step_output)
            except FAULTS:
                self.cancel(handle)  # its receiver is broken; others are not affected


class OutputStream:
    """Submits requests and iterates over (number of the output, step output) until every output has ended.

    Outputs are numbered over all requests. Leaving `async with`, or calling `close`, cancels what has not ended. A slow
    reader delays nothing: step outputs are kept until they are read.

    Raises:
        RuntimeFault, Busy: one request was not accepted; then none of them is.
    """

    def __init__(self, service: Service, requests: Sequence[Request]) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, StepOutput]] = asyncio.Queue()
        self.num_outputs = self._num_open = sum(request.num_outputs for request in requests)
        self._handle = service.submit(requests[0], self._receive, *requests[1:])

    def _receive(self, step_output: StepOutput) -> None:  # on the scheduler's thread
        with suppress(RuntimeError):  # the loop was closed: no reader is left
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (step_output.output_index, step_output))

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> tuple[int, StepOutput]:
        if not self._num_open:
            raise StopAsyncIteration
        index, step_output = await self._queue.get()
        self._num_open -= step_output.finish_reason is not None
        return index, step_output

    def close(self) -> None:
        if self._num_open:
            self._service.cancel(self._handle)

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *fault: object) -> None:
        self.close()

    async def generations(self) -> list[Generation]:
        """Returns all outputs in their order, once every one has ended."""
        step_outputs: list[list[StepOutput]] = [[] for _ in range(self.num_outputs)]
        async for index, step_output in self:
            step_outputs[index].append(step_output)
        return [generation_of_steps(steps) for steps in step_outputs]


def make_scheduler(
    engine: SpecEngine,
    planner: Planner | None = None,
    prefill_chunk: int = 128,
    keep_prefixes: bool = True,
    clock: Callable[[], float] = perf_counter,
) -> Scheduler:
    """Returns a scheduler of requests, as the only user of an engine."""
    # Drafts are deterministic and the target's draws decide, so a text depends neither on other requests nor on the
    # planner.
    batch = SequenceBatch((), engine.context.max_slots, True, engine.context.max_draft_nodes)
    engine.reset()
    return Scheduler(
        engine.verifier,
        engine.proposer,
        batch,
        engine.engines,
        planner or FixedLength(),
        prefill_chunk=prefill_chunk,
        keep_prefixes=keep_prefixes,
        reset=lambda: engine.reset(clears=True),
        clock=clock,
    )


def open_outputs(handle: RequestHandle, requests: Sequence[Request], engine: SpecEngine, default: Speculation) -> None:
    """Makes the sequences of a new request handle. Raises RuntimeFault: see `SpecEngine.generate`."""
    for request in requests:
        images = engine.read_images(request.images)
        asked = request.prompt
        prompt = engine.encode(asked, len(images)) if isinstance(asked, str) else token_ids(0, asked)
        for index in range(request.num_outputs):
            sampling = request.sampling
            if index:
                sampling = replace(sampling, seed=(sampling.seed + index) % 2**64)
            sequence = engine.make_sequence(0, prompt, sampling, with_text=True, images=images)
            sequence.index, sequence.wants_trace = len(handle.open), request.wants_trace
            sequence.speculation = default if request.speculation == "auto" else request.speculation
            handle.add(sequence)
