# SPDX-License-Identifier: Apache-2.0
"""What the Python-based backend `speccompile` gives to Triton: one class, whose part the model's settings name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from speccompile.errors import SpecCompileError
from speccompile.serving.triton.parent import end_with_parent
from speccompile.serving.triton.settings import settings_from_args

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
