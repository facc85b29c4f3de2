# SPDX-License-Identifier: Apache-2.0
"""From the scheduler's step outputs to output tensors, errors among them. numpy alone: testable without Triton."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.runtime.requests import StepOutput
from speccompile.serving.triton.contract import (
    FAILURE,
    FINISH_REASON,
    NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS,
    OUTPUT_IDS,
    PERF_OUTPUTS,
    SEQUENCE_LENGTH,
    TEXT_OUTPUT,
)
from speccompile.serving.triton.request_parsing import Call

# Finish reasons for which the client gets an error, so that a cut text is never taken for a whole one.
FAILURES = ("error", "timeout", "cancelled")
_DTYPES = {"int32": np.int32, "int64": np.int64, "float32": np.float32}


@dataclass
class Growing:
    """One output of one row, as far as it has come."""

    row: int
    index: int
    text: str = ""  # not sent yet
    tokens: list[int] = field(default_factory=list)  # not sent yet
    num_tokens: int = 0
    finish_reason: str | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    finished_ns: int = 0
    is_sent: bool = False  # with its end


class Answer:
    """The outputs of a call so far."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.sequences = {(r, i): Growing(r, i) for r, q in enumerate(call.rows) for i in range(q.num_outputs)}
        self.failure: tuple[str, str] | None = None  # finish reason, message

    @property
    def is_done(self) -> bool:
        """True once every sequence has ended."""
        return all(sequence.finish_reason is not None for sequence in self.sequences.values())

    def push(self, row: int, step_output: StepOutput) -> None:
        """Adds a step output of a row."""
        sequence = self.sequences[row, step_output.output_index]
        sequence.text += step_output.text
        sequence.tokens += step_output.tokens
        sequence.num_tokens += len(step_output.tokens)
        if step_output.finish_reason is not None:
            sequence.finish_reason, sequence.stats = step_output.finish_reason, step_output.stats or {}
            sequence.finished_ns = time.time_ns()
            if step_output.finish_reason in FAILURES and self.failure is None:
                self.failure = step_output.finish_reason, step_output.error or ""

    def step_outputs(self) -> list[dict[str, NDArray[Any]]]:
        """Returns the responses of a stream since the last call, one for each sequence that has something new."""
        wants_ids = OUTPUT_IDS.name in self.call.wanted
        ready = [s for s in self.sequences.values() if s.text or (wants_ids and s.tokens) or s.finish_reason]
        responses = []
        for sequence in ready:
            if sequence.is_sent:
                continue
            responses.append(self._arrays([[sequence]], is_last=sequence.finish_reason is not None))
            sequence.text, sequence.tokens = "", []
            sequence.is_sent = sequence.finish_reason is not None
        return responses

    def whole(self) -> dict[str, NDArray[Any]]:
        """Returns the one response of a call that does not stream: [rows,] sequences."""
        num_rows = len(self.call.rows)
        rows = [[s for s in self.sequences.values() if s.row == row] for row in range(num_rows)]
        return self._arrays(rows, is_last=True)

    def _arrays(self, rows: Sequence[Sequence[Growing]], is_last: bool) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        wanted = self.call.wanted
        if TEXT_OUTPUT.name in wanted:
            arrays[TEXT_OUTPUT.name] = np.array([[self._text(s) for s in row] for row in rows], dtype=np.object_)
        if OUTPUT_IDS.name in wanted or SEQUENCE_LENGTH.name in wanted:
            arrays |= self._ids(rows)
        for name in ("batch_index", "sequence_index"):
            if name in wanted:
                key = "row" if name == "batch_index" else "index"
                arrays[name] = np.array([[getattr(s, key) for s in row] for row in rows], dtype=np.int32)
        if is_last:
            arrays |= self._results(rows)
        sent = {name: array for name, array in arrays.items() if name in wanted}
        return sent if self.call.has_batch else {name: array[0] for name, array in sent.items()}

    def _text(self, sequence: Growing) -> bytes:
        prompt = self.call.texts[sequence.row] if self.call.echoes else ""
        return (prompt + sequence.text).encode()

    def _ids(self, rows: Sequence[Sequence[Growing]]) -> dict[str, NDArray[Any]]:
        lists = [[self._tokens(s) for s in row] for row in rows]
        size = max(len(tokens) for row in lists for tokens in row)
        ids = [[tokens + [self.call.end_id] * (size - len(tokens)) for tokens in row] for row in lists]
        shape = (len(lists), len(lists[0]), size)
        return {
            OUTPUT_IDS.name: np.array(ids, dtype=np.int32).reshape(shape),
            SEQUENCE_LENGTH.name: np.array([[len(tokens) for tokens in row] for row in lists], dtype=np.int32),
        }

    def _tokens(self, sequence: Growing) -> list[int]:
        prompt = self.call.prompts[sequence.row] if self.call.echoes else []
        return [*prompt, *sequence.tokens]

    def _results(self, rows: Sequence[Sequence[Growing]]) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        for tensor in (*PERF_OUTPUTS, NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS):
            if tensor.name in self.call.wanted:
                values = [[_RESULTS[tensor.name](s, self.call.arrival_ns) for s in row] for row in rows]
                arrays[tensor.name] = np.array(values, dtype=_DTYPES[tensor.dtype])
        if FINISH_REASON.name in self.call.wanted:
            reasons = [[(s.finish_reason or "").encode() for s in row] for row in rows]
            arrays[FINISH_REASON.name] = np.array(reasons, dtype=np.object_)
        return arrays


def _acceptance_rate(sequence: Growing, arrival_ns: int) -> float:
    drafted = sequence.stats.get("num_draft_tokens", 0)
    return float(sequence.stats.get("num_accepted", 0) / drafted) if drafted else 0.0


def _acceptance_length(sequence: Growing, arrival_ns: int) -> float:
    steps = sequence.stats.get("num_steps", 0)
    return float(1 + sequence.stats.get("num_accepted", 0) / steps) if steps else 1.0


def _counted(key: str) -> Callable[[Growing, int], int]:
    return lambda sequence, arrival_ns: int(sequence.stats.get(key, 0))


def _moment(key: str) -> Callable[[Growing, int], int]:
    return lambda sequence, arrival_ns: arrival_ns + int(1e6 * float(sequence.stats.get(key) or 0.0))


_RESULTS: dict[str, Callable[[Growing, int], float]] = {
    "acceptance_rate": _acceptance_rate,
    "mean_acceptance_length": _acceptance_length,
    "total_accepted_draft_tokens": _counted("num_accepted"),
    "total_draft_tokens": _counted("num_draft_tokens"),
    "num_input_tokens": _counted("num_prompt_tokens"),
    "num_output_tokens": lambda sequence, arrival_ns: sequence.num_tokens,
    "arrival_time_ns": lambda sequence, arrival_ns: arrival_ns,
    "first_scheduled_time_ns": _moment("queue_ms"),
    "first_token_time_ns": _moment("time_to_first_token_ms"),
    "last_token_time_ns": lambda sequence, arrival_ns: sequence.finished_ns,
}


# Parameters that our own model `tensorrt_llm_bls` sends with its requests.
AS_OUTPUTS = "speccompile_failures_as_outputs"
STOP_ID = "speccompile_stop_id"


class Reply:
    """The way back to a client.

    Args:
        sender: Triton's response sender of the request.
        as_outputs: send errors as the output `failure`: Triton 2.51 loses one after a response to a calling model.
    """

    def __init__(self, pb: Any, sender: Any, has_batch: bool = False, as_outputs: bool = False) -> None:
        self._pb, self._sender, self._has_batch, self._as_outputs = pb, sender, has_batch, as_outputs

    def send(self, outputs: Mapping[str, NDArray[Any]], is_last: bool) -> bool:
        """Sends one response; returns False where the client has disconnected."""
        tensors = [self._pb.Tensor(name, array) for name, array in outputs.items()]
        return self._send(self._pb.InferenceResponse(tensors), is_last)

    def end(self) -> None:
        self._sender.send(flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def fail(self, message: str, kind: str) -> None:
        """Sends an error as the last response; `kind` is a name in `TritonError`."""
        if self._as_outputs:
            words = np.array([kind.encode(), message.encode()], dtype=np.object_)
            self.send({FAILURE.name: words[None] if self._has_batch else words}, is_last=True)
            return
        error = self._pb.TritonError(message, getattr(self._pb.TritonError, kind))
        self._send(self._pb.InferenceResponse(error=error), is_last=True)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())

    def _send(self, response: Any, is_last: bool) -> bool:
        flags = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
        try:
            self._sender.send(response, flags=flags)
        except self._pb.TritonModelException:
            return False
        return True
