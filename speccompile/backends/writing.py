# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the ONNX backends: run a table on a copy of the model, attach op bodies, write the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CompileOptions
from speccompile.core.specs import GraphSpec
from speccompile.graph_kinds.decoder import rollback_spec
from speccompile.graph_kinds.int8_caches import INT8, with_int8_caches
from speccompile.ops.registry import Dialect, attach_functions
from speccompile.passes.base import Pass, histogram_from_model, run_pipeline
from speccompile.passes.rollback import build_rollback
from speccompile.passes.save import save_model


def has_int8_caches(options: CompileOptions | None) -> bool:
    return options is not None and options.kv_cache == INT8


def compiled_spec(spec: GraphSpec, options: CompileOptions | None) -> dict[str, Any]:
    """Returns the part of a report that states the spec of the compiled graph where it is not `spec`."""
    return {"spec": with_int8_caches(spec).json_from_spec()} if has_int8_caches(options) else {}


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


def save_rollback(dims: ModelDims, path: Path, options: CompileOptions | None = None) -> GraphSpec:
    """Write the cache compaction graph of a model to `path`; returns its spec."""
    spec = rollback_spec(dims)
    if has_int8_caches(options):
        spec = with_int8_caches(spec, spec.caches)
    model = build_rollback(spec)
    attach_functions(model)
    save_model(model, path)
    return spec
