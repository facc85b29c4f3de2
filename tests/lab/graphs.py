# SPDX-License-Identifier: Apache-2.0
"""Graphs that run: sessions of ONNX Runtime on the CPU, and what a backend compiled and opens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from speccompile.backends.base import CompileJob, LoadJob
from speccompile.core import registry
from speccompile.core.specs import GraphSpec


def open_session(
    model: Any, kernels: Path | None = None, threads: int = 1, options: ort.SessionOptions | None = None
) -> ort.InferenceSession:
    """Returns a session of a model, without our kernels or with those of a library.

    Args:
        model: of onnx_ir or of onnx.
        options: others than quiet ones of `threads` threads.
    """
    if options is None:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
    if kernels is not None:
        options.register_custom_ops_library(str(kernels))
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_session(model: Any, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Returns the outputs of a model under ONNX Runtime, without our kernels: function bodies are run."""
    return open_session(model).run(None, dict(feeds))


@dataclass(frozen=True)
class Compiled:
    """A graph as a backend compiled it."""

    backend: Any
    path: Path
    spec: GraphSpec
    rollback: Path | None = None

    def open(self, max_slots: int = 1, tuning: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """Returns an engine of one thread; `more` are fields of its `LoadJob`."""
        settings = {"threads": 1, **(tuning or {})}
        job = LoadJob(self.path, self.spec, max_slots=max_slots, tuning=settings, rollback=self.rollback, **more)
        return self.backend.load(job)


def compile_graph(model: Any, spec: GraphSpec, folder: Path, backend: Any, dims: Any = None, **more: Any) -> Compiled:
    """Compiles a graph into `folder`, with its rollback where `dims` are given.

    Args:
        backend: or its name.
        more: fields of the `CompileJob`.
    """
    maker = registry.backend(backend) if isinstance(backend, str) else backend
    maker.compile(CompileJob(model, spec, folder, **more))
    rollback = None
    if dims is not None:
        maker.compile_rollback(dims, folder / "rollback")
        rollback = folder / "rollback" / maker.graph_file
    return Compiled(maker, folder / maker.graph_file, spec, rollback)
