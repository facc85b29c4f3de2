# SPDX-License-Identifier: Apache-2.0
"""What the Python-based backend `speccompile` gives to Triton: one class, whose part the model's settings name."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from speccompile.errors import RuntimeFault, SpecCompileError
from speccompile.serving.triton.settings import settings_from_args

PARENT_POLL_S = 1.0
_PARTS = {
    "engine": ("speccompile.serving.triton.engine_part", "EnginePart"),
    "preprocessing": ("speccompile.serving.triton.trtllm.tokenizer_parts", "Preprocessing"),
    "postprocessing": ("speccompile.serving.triton.trtllm.tokenizer_parts", "Postprocessing"),
    "bls": ("speccompile.serving.triton.trtllm.bls_part", "BlsPart"),
}


class TritonPythonModel:
    """What Triton's Python backend calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the part; on a fault the model is not loaded, and the server's log says why."""
        pb = importlib.import_module("triton_python_backend_utils")
        end_with_parent()
        try:
            check_tensors(pb)
            settings, _ = settings_from_args(args)
            module, name = _PARTS[settings.part]
            self._part = getattr(importlib.import_module(module), name)(pb, args)
        except ModuleNotFoundError as fault:
            todo = "Install its extra [ort] there, or write the repository with --python-env DIR."
            raise pb.TritonModelException(f"{fault}; Triton runs this model with {sys.executable}. {todo}") from fault
        except SpecCompileError as fault:
            raise pb.TritonModelException(f"{fault} (Python: {sys.executable})") from fault

    def execute(self, requests: list[Any]) -> list[Any] | None:
        responses: list[Any] | None = self._part.execute(requests)
        return responses

    def finalize(self) -> None:
        part = getattr(self, "_part", None)
        if part is not None:
            part.finalize()


def check_tensors(pb: Any) -> None:
    """Sends an array through the memory of the server's Python stub and compares it.

    One compiled for numpy 1 reads numpy 2's strides wrongly: [1, 2, 3, 4] arrives as [1, 1, 1, 1] (Triton 2.51).
    """
    sent = np.arange(1, 5, dtype=np.int32)
    read = pb.Tensor.from_dlpack("probe", pb.Tensor("probe", sent).to_dlpack()).as_numpy()
    if not np.array_equal(sent, read):
        raise RuntimeFault(
            f"numpy {np.__version__} in the server's Python stub",
            f"{read.tolist()} where {sent.tolist()} was sent",
            "tensors that arrive as they were sent",
            "This stub was built for numpy 1: install 'numpy<2' in the environment that the model runs in.",
        )


def end_with_parent(poll_s: float = PARENT_POLL_S) -> threading.Thread:
    """Starts and returns a thread that ends this process with status 1 when its parent has ended, seen every `poll_s`.

    Triton's stub watches its server as well, yet a model was once seen running 180 s after its server was killed.
    """
    thread = threading.Thread(target=_watch, args=(os.getppid(), poll_s), name="speccompile-parent", daemon=True)
    thread.start()
    return thread


def _watch(parent: int, poll_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(poll_s)
    os._exit(1)
