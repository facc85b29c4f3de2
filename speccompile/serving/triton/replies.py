# SPDX-License-Identifier: Apache-2.0
"""How responses of a request leave the model, its errors among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.serving.triton.contract import FAILURE

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
