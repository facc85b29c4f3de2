# SPDX-License-Identifier: Apache-2.0
"""Clients of a Triton server: SSE on a plain connection, gRPC streams by NVIDIA's client."""

from __future__ import annotations

import http.client
import json
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from bench.triton_server import TritonServer

LIMIT_S = 180.0
DTYPES = {"str": ("BYTES", np.object_), "bool": ("BOOL", np.bool_), "float": ("FP32", np.float32)}


def wait_until(is_so: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait for a condition, for as long as a loaded machine may need."""
    start = time.monotonic()
    while not is_so():
        assert time.monotonic() - start < limit_s, f"not seen in {limit_s} s: {what}"
        time.sleep(0.05)


def settled_metrics(server: TritonServer) -> dict[str, float]:
    """Returns the metrics once nothing runs; the model brings them up to date twice a second."""
    last: dict[str, float] = {}

    def is_settled() -> bool:
        nonlocal last
        before, last = last, server.metrics()
        if last != before or last["speccompile_active"]:
            time.sleep(1.2)
            return False
        return True

    wait_until(is_settled, "metrics that stand still")
    return last


class Sse:
    """A running `/generate_stream`; the connection is closed by `close`."""

    def __init__(self, server: TritonServer, body: Mapping[str, Any], model: str = "speccompile") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=LIMIT_S)
        headers = {"Content-Type": "application/json"}
        path = f"/v2/models/{model}/generate_stream"
        self._connection.request("POST", path, json.dumps({**body, "stream": True}), headers)
        self._response = self._connection.getresponse()
        self.status = self._response.status

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields the documents after `data:`. A line that is not UTF-8 is a fault of the test."""
        for line in self._response:
            if line.startswith(b"data:"):
                yield json.loads(line[5:].decode("utf-8"))

    def close(self) -> None:
        self._connection.close()
        self._response.close()


def stream_text(server: TritonServer, body: Mapping[str, Any], model: str = "speccompile") -> str:
    """Returns the whole text of a stream."""
    stream = Sse(server, body, model)
    assert stream.status == 200
    step_outputs = [event["text_output"] for event in stream.events()]
    stream.close()
    return "".join(step_outputs)


class GrpcStream:
    """A bidirectional gRPC stream with one request in it."""

    def __init__(
        self,
        server: TritonServer,
        values: Mapping[str, Any],
        model: str = "speccompile",
        headers: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        import tritonclient.grpc as triton

        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client = triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        self._client.start_stream(lambda result, error: self._answers.put((result, error)), headers=headers)
        inputs = [grpc_input(triton, name, value) for name, value in values.items()]
        self._client.async_stream_infer(model, inputs, enable_empty_final_response=True, **kwargs)

    def results(self) -> Iterator[Any]:
        """Yields answers until the last; raises an error that comes."""
        while True:
            result, error = self._answers.get(timeout=LIMIT_S)
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                yield result
            if response.parameters["triton_final_response"].bool_param:
                return

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        self._client.stop_stream()
        self._client.close()


def grpc_input(triton: Any, name: str, value: Any) -> Any:
    """Returns a tensor of a value: an array as it is, else [1]."""
    array = value if isinstance(value, np.ndarray) else _array(value)
    kinds = {"O": "BYTES", "b": "BOOL", "f": "FP32", "i": "INT32", "u": "UINT64"}
    tensor = triton.InferInput(name, list(array.shape), kinds[array.dtype.kind])
    tensor.set_data_from_numpy(array)
    return tensor


def _array(value: Any) -> Any:
    if isinstance(value, str):
        return np.array([value.encode()], dtype=np.object_)
    if isinstance(value, bool):
        return np.array([value])
    return np.array([value], dtype=np.float32 if isinstance(value, float) else np.int32)


def text_of(result: Any) -> str:
    """Returns the text of one answer of a stream."""
    return b"".join(result.as_numpy("text_output").reshape(-1)).decode("utf-8")
