# SPDX-License-Identifier: Apache-2.0
"""The model `tensorrt_llm_bls` of the layout `trtllm`: calls `preprocessing`, then `tensorrt_llm`, and hands on.

Each request has a thread of a pool. A second thread polls for disconnected clients and stops the engine: Triton passes
no cancellation from one model to another.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from speccompile.errors import SpecCompileError
from speccompile.serving.triton.contract import FAILURE
from speccompile.serving.triton.request_parsing import check_parameters
from speccompile.serving.triton.response_building import AS_OUTPUTS, STOP_ID
from speccompile.serving.triton.settings import settings_from_args
from speccompile.serving.triton.trtllm.contract import engine_outputs, text_outputs
from speccompile.serving.triton.trtllm.layout import FROM_PREPROCESSING, TO_PREPROCESSING, engine_names

POLL_S = 0.1
MAX_THREADS = 512  # a thread waits, mostly; the engine's queue is what bounds the work


class Relay:
    """A request on its way through the models."""

    def __init__(self, sender: Any, name: str) -> None:
        self.sender, self.name = sender, name
        self.is_stopped = False


class OpenRelays:
    """The requests whose last response was not sent yet."""

    def __init__(self) -> None:
        self._relays: set[Relay] = set()
        self._lock = threading.Lock()  # over the set, and while a sender of it answers

    def add(self, relay: Relay) -> None:
        with self._lock:
            self._relays.add(relay)

    def close(self, relay: Relay) -> None:
        with self._lock:
            self._relays.discard(relay)

    def running(self) -> list[Relay]:
        with self._lock:
            return [relay for relay in self._relays if not relay.is_stopped]

    def is_gone(self, relay: Relay) -> bool:
        """Returns whether the client of an open request has disconnected.

        Triton 2.51 crashes on this question after a request's last response, hence the lock.
        """
        with self._lock:
            return relay in self._relays and bool(relay.sender.is_cancelled())


class BlsPart:
    """See the module."""

    def __init__(self, pb: Any, args: Mapping[str, str]) -> None:
        self._pb = pb
        self._settings, config = settings_from_args(args)
        self._has_batch = int(config["max_batch_size"]) > 0
        self._inputs = [entry["name"] for entry in config["input"]]
        self._names = engine_names()
        self._numbers = itertools.count()
        self._open = OpenRelays()
        self._is_ending = threading.Event()
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="speccompile-relay")
        self._watcher = threading.Thread(target=self._watch, name="speccompile-watch", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """Take requests in; they are answered later."""
        for request in requests:
            tensors = {name: self._pb.get_input_tensor_by_name(request, name) for name in self._inputs}
            # Copied: Triton takes the request's memory back when this method returns.
            arrays = {name: np.array(tensor.as_numpy()) for name, tensor in tensors.items() if tensor is not None}
            relay = Relay(request.get_response_sender(), f"{os.getpid()}-{next(self._numbers)}")
            self._open.add(relay)
            self._pool.submit(self._run, relay, arrays, self._wanted(request), request.parameters())

    def finalize(self) -> None:
        self._pool.shutdown(wait=True)
        self._is_ending.set()
        self._watcher.join()

    def _wanted(self, request: Any) -> list[str]:
        named = list(request.requested_output_names())
        everything = {tensor.name for tensor in text_outputs()}
        return [t.name for t in engine_outputs()] if set(named) == everything else [*named, FAILURE.name]

    def _run(self, relay: Relay, arrays: dict[str, Any], wanted: list[str], parameters: str) -> None:
        pb = self._pb
        error: Any = pb.TritonError("The model has ended; see the server's log.", pb.TritonError.INTERNAL)
        try:
            check_parameters(json.loads(parameters or "{}"), self._settings.ignored_parameters)
            error = self._relay(relay, arrays, wanted)
        except SpecCompileError as fault:
            error = pb.TritonError(str(fault), pb.TritonError.INVALID_ARG)
        except pb.TritonModelException as fault:  # a model that is not there, or that ended under the request
            error = pb.TritonError(str(fault), pb.TritonError.INTERNAL)
        finally:
            self._open.close(relay)
            final = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            if error is None:
                relay.sender.send(flags=final)
            else:
                relay.sender.send(pb.InferenceResponse(error=error), flags=final)

    def _relay(self, relay: Relay, arrays: dict[str, Any], wanted: list[str]) -> Any | None:
        """Call one model after the other; returns an error that one of them gave, as ours."""
        query = {there: arrays[name] for there, name in TO_PREPROCESSING.items() if name in arrays}
        request = self._request(self._settings.preprocessing_model, query, list(FROM_PREPROCESSING.values()), relay)
        response = request.exec()
        if response.has_error():
            return self._pb.TritonError(response.error().message(), self._pb.TritonError.INVALID_ARG)
        outputs = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        inputs = {name: outputs[output] for name, output in FROM_PREPROCESSING.items()}
        inputs |= {there: arrays[name] for name, there in self._names.items() if name in arrays}
        request = self._request(self._settings.engine_model, inputs, wanted, relay, {AS_OUTPUTS: True})
        error = None
        for response in request.exec(decoupled=True):  # read to its end, or Triton keeps it for ever
            if response.has_error():
                error = self._pb.TritonError(response.error().message(), self._pb.TritonError.INTERNAL)
            else:
                error = self._hand_on(relay, {t.name(): t for t in response.output_tensors()}) or error
        return error

    def _hand_on(self, relay: Relay, tensors: dict[str, Any]) -> Any | None:
        if FAILURE.name in tensors:
            kind, message = (word.decode() for word in tensors[FAILURE.name].as_numpy().reshape(-1))
            return self._pb.TritonError(message, getattr(self._pb.TritonError, kind))
        known = {tensor.name for tensor in text_outputs()}
        outputs = [self._pb.Tensor(name, t.as_numpy()) for name, t in tensors.items() if name in known]
        if outputs and not relay.is_stopped:
            relay.sender.send(self._pb.InferenceResponse(outputs))
        return None

    def _request(
        self,
        model: str,
        inputs: Mapping[str, Any],
        wanted: Sequence[str],
        relay: Relay,
        parameters: Mapping[str, Any] | None = None,
    ) -> Any:
        tensors = [self._pb.Tensor(name, array) for name, array in inputs.items()]
        return self._pb.InferenceRequest(
            model_name=model,
            requested_output_names=list(wanted),
            inputs=tensors,
            request_id=relay.name,
            parameters=dict(parameters or {}),
        )

    def _watch(self) -> None:
        while not self._is_ending.wait(POLL_S):
            for relay in self._open.running():
                if self._open.is_gone(relay):
                    relay.is_stopped = True
                    self._stop(relay)

    def _stop(self, relay: Relay) -> None:
        one = (1, 1) if self._has_batch else (1,)
        numbers = {name: np.ones(one, dtype=np.int32) for name in ("input_ids", "input_lengths", "request_output_len")}
        inputs = {**numbers, "stop": np.ones(one, dtype=np.bool_)}
        nothing = ["sequence_length"]
        request = self._request(self._settings.engine_model, inputs, nothing, relay, {STOP_ID: relay.name})
        for _ in request.exec(decoupled=True):
            pass
