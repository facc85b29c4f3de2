# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the ONNX backends: run a table on a copy of the model, attach op bodies, write the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from speccompile.core.dims import ModelDims
from speccompile.core.specs import GraphSpec
from speccompile.graph_kinds.decoder import rollback_spec
from speccompile.ops.registry import Dialect, attach_functions
from speccompile.passes.base import Pass, histogram_from_model, run_pipeline
from speccompile.passes.rollback import build_rollback
from speccompile.passes.save import save_model


def lower_and_save(
    model: ir.Model,
    table: Sequence[Pass],
    path: Path,
    progress: Callable[[str], None] | None = None,
    dialect: Dialect = "onnx",
    max_nodes: int = 17,
    finish: Sequence[Pass] = (),
) -> dict[str, Any]:
    """Runs `table` on a copy of `model` and writes it to `path` with its external data.

    Returns {"passes": [...], "op_histogram": {"before", "after"}}, JSON-ready. `dialect` is that of `attach_functions`.
    """
    work = model.clone()
    before = histogram_from_model(work)
    traces = run_pipeline(work, table, progress)
    after = histogram_from_model(work)
    attach_functions(work, dialect, max_nodes)
    traces += run_pipeline(work, finish, progress)
    save_model(work, path, progress)
    passes = [trace.json_from_trace() for trace in traces]
    return {"passes": passes, "op_histogram": {"before": before, "after": after}}


def save_rollback(dims: ModelDims, path: Path) -> GraphSpec:
    """Write the cache compaction graph of a model to `path`; returns its spec."""
    spec = rollback_spec(dims)
    model = build_rollback(spec)
    attach_functions(model)
    save_model(model, path)
    return spec
