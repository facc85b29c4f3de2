# SPDX-License-Identifier: Apache-2.0
"""The decoupled model: tokenizer and scheduler inside, every Triton request a call, one thread that answers.

Triton's `execute` and the scheduler's thread put events into a queue; one thread takes them out, so that responses keep
their order and the scheduler never waits for Triton.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from speccompile.errors import SpecCompileError
from speccompile.runtime.engine import load
from speccompile.runtime.requests import FAULTS, Busy, StepOutput, text_from_fault
from speccompile.runtime.service import Service, ServiceOptions
from speccompile.serving.triton.metrics import Metrics
from speccompile.serving.triton.request_parsing import Rules, call_from_arrays, check_parameters
from speccompile.serving.triton.response_building import AS_OUTPUTS, STOP_ID, Answer, Reply
from speccompile.serving.triton.settings import Settings, settings_from_args
from speccompile.serving.triton.trtllm.contract import TrtllmRules

CANCEL_POLL_S = 0.1  # seconds between two polls for disconnected clients
METRICS_S = 0.5
_KINDS = {"cancelled": "CANCELLED", "timeout": "UNAVAILABLE"}
_MESSAGES = {
    "cancelled": "The request was cancelled.",
    "timeout": "The request took longer than its time-out; what came of it is not whole.",
}


class Exchange:
    """A Triton request on its way. `request_id`: as the client named it, or empty."""

    def __init__(self, reply: Reply, request_id: str, answer: Answer) -> None:
        self.reply, self.request_id, self.answer = reply, request_id, answer
        self.handle: Any = None
        self.is_over = False


class Event(NamedTuple):
    """A step output for a row of an exchange."""

    exchange: Exchange
    row: int
    step_output: StepOutput


class EnginePart:
    """See the module."""

    def __init__(self, pb: Any, args: Mapping[str, str]) -> None:
        self._pb = pb
        settings, config = settings_from_args(args)
        self._settings = settings
        engine = load(
            settings.bundle,
            backend=settings.backend or None,
            threads=settings.threads or None,
            method=settings.method or None,
        )
        make_rules = TrtllmRules if settings.rules == "trtllm" else Rules
        self._rules = make_rules(
            engine.defaults, engine.eos_token_ids, engine.tokenizer, has_batch=int(config["max_batch_size"]) > 0
        )
        self._known = frozenset(output["name"] for output in config["output"])
        self._inputs = [entry["name"] for entry in config["input"]]
        self._service = Service(engine, _options(settings))
        self._metrics = Metrics(pb, {"model": args["model_name"], "version": args["model_version"]})
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._open: set[Exchange] = set()
        self._lock = threading.Lock()  # over _open
        self._is_answering = True
        self._service.start()
        self._thread = threading.Thread(target=self._answer, name="speccompile-answers", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Take requests in; they are answered later."""
        for request in requests:
            parameters = json.loads(request.parameters() or "{}")
            as_outputs = bool(parameters.pop(AS_OUTPUTS, False))
            reply = Reply(self._pb, request.get_response_sender(), self._rules.has_batch, as_outputs)
            try:
                self._take(request, reply, parameters)
            except Busy as fault:
                reply.fail(str(fault), "UNAVAILABLE")
            except SpecCompileError as fault:
                reply.fail(str(fault), "INVALID_ARG")
            except FAULTS as fault:  # a bug: other requests are not affected
                reply.fail(text_from_fault(fault), "INTERNAL")

    def finalize(self) -> None:
        """Finish what runs, for as long as the settings allow; answer all, then end the threads."""
        self._service.close(self._settings.drain_s)
        self._events.put(None)
        self._thread.join()

    def _take(self, request: Any, reply: Reply, parameters: dict[str, Any]) -> None:
        arrays = {}
        for name in self._inputs:
            tensor = self._pb.get_input_tensor_by_name(request, name)
            if tensor is not None:
                arrays[name] = tensor.as_numpy()
        stop_id = parameters.pop(STOP_ID, request.request_id())
        if np.any(arrays.pop("stop", np.zeros(1, dtype=np.bool_))):
            self._stop(stop_id)
            reply.end()
            return
        check_parameters(parameters, self._settings.ignored_parameters)
        if not self._is_answering:
            raise Busy(
                "model", "its thread has ended", "a running one", "Load the model again; the server's log says why."
            )
        call = call_from_arrays(arrays, request.requested_output_names(), self._known, self._rules)
        exchange = Exchange(reply, request.request_id(), Answer(call))
        with self._lock:
            self._open.add(exchange)
        try:
            exchange.handle = self._service.submit(call.rows[0], self._sink(exchange), *call.rows[1:])
        except FAULTS:
            self._drop(exchange)
            raise
        if exchange.is_over:  # a row failed before the handle was there
            self._drop(exchange)

    def _sink(self, exchange: Exchange) -> Callable[[StepOutput], None]:
        owners = [
            (row, at) for row, request in enumerate(exchange.answer.call.rows) for at in range(request.num_outputs)
        ]

        def take(step_output: StepOutput) -> None:
            row, at = owners[step_output.output_index]
            self._events.put(Event(exchange, row, step_output._replace(output_index=at)))

        return take

    def _stop(self, request_id: str) -> None:
        with self._lock:
            meant = [exchange for exchange in self._open if request_id and exchange.request_id == request_id]
        for exchange in meant:
            self._cancel(exchange.handle)

    def _answer(self) -> None:
        try:
            self._answer_all()
        finally:
            self._is_answering = False
            with self._lock:
                left = list(self._open)
            for exchange in left:
                self._drop(exchange)
                exchange.reply.fail("The model has ended; see the server's log.", "INTERNAL")

    def _answer_all(self) -> None:
        polled_at = reported_at = time.monotonic()
        is_ending = False
        while not is_ending:
            events = self._next_events()
            is_ending = None in events
            touched: dict[Exchange, None] = {}
            for event in events:
                if event is not None and not event.exchange.is_over:
                    event.exchange.answer.push(event.row, event.step_output)
                    touched[event.exchange] = None
            for exchange in touched:
                self._advance(exchange)
            now = time.monotonic()
            if now - polled_at >= CANCEL_POLL_S:
                polled_at = now
                self._cancel_disconnected()
            if now - reported_at >= METRICS_S or is_ending:
                reported_at = now
                self._metrics.update(self._service.stats())

    def _next_events(self) -> list[Event | None]:
        events: list[Event | None] = []
        try:
            events.append(self._events.get(timeout=CANCEL_POLL_S))
            while True:
                events.append(self._events.get_nowait())
        except Empty:
            return events

    def _advance(self, exchange: Exchange) -> None:
        answer = exchange.answer
        if answer.failure is not None:
            self._drop(exchange)
            reason, message = answer.failure
            exchange.reply.fail(message or _MESSAGES.get(reason, reason), _KINDS.get(reason, "INTERNAL"))
            return
        arrays = answer.step_outputs() if answer.call.streams else [answer.whole()] if answer.is_done else []
        for index, outputs in enumerate(arrays):
            if not exchange.reply.send(outputs, is_last=answer.is_done and index == len(arrays) - 1):
                self._drop(exchange)  # the client has disconnected, which ended the request
                return
        if answer.is_done:
            self._finish(exchange)

    def _drop(self, exchange: Exchange) -> None:
        handle = exchange.handle
        self._finish(exchange)
        self._cancel(handle)

    def _cancel(self, handle: Any) -> None:
        if handle is not None:  # it is not there yet, or was dropped
            self._service.cancel(handle)

    def _finish(self, exchange: Exchange) -> None:
        exchange.is_over = True
        exchange.handle = None  # a request handle refers to its exchange by its callback
        with self._lock:
            self._open.discard(exchange)

    def _cancel_disconnected(self) -> None:
        with self._lock:
            still = list(self._open)
        for exchange in still:
            if exchange.reply.is_cancelled():
                self._cancel(exchange.handle)


def _options(settings: Settings) -> ServiceOptions:
    return ServiceOptions(
        max_queue=settings.max_queue,
        timeout_s=settings.timeout_s or None,
        speculation=settings.speculation,  # type: ignore[arg-type]
    )
