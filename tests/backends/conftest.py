# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llama, exported once, compiled for each backend and quantisation when a test asks for it."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from speccompile.backends.base import CompileJob, LoadJob
from speccompile.core import registry
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CompileOptions
from speccompile.core.specs import GraphSpec, spec_from_json
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, verified_spec
from tests import store

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
MAX_ROWS = 1024


@pytest.fixture(scope="session")
def neutral(tmp_path_factory: pytest.TempPathFactory) -> tuple[ir.Model, ModelDims]:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return store.export_decoder(folder, weights="random", max_seq_len=MAX_ROWS)


Opener = Callable[..., Any]


@pytest.fixture(scope="session")
def compiled(neutral: tuple[ir.Model, ModelDims], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """(backend, quantization, form, role, kv_cache) -> (graph, spec, rollback graph)."""
    model, dims = neutral

    @functools.cache
    def make(
        backend: str, quantization: str, form: str, role: str, kv_cache: str = "auto"
    ) -> tuple[Path, GraphSpec, Path]:
        decoder = decoder_spec(role, dims)
        spec = candidate_spec(decoder, 1, dists=True) if role == "draft" else verified_spec(decoder, keep_logits=True)
        folder = tmp_path_factory.mktemp(f"{backend}-{form}-{role}")
        maker, options = registry.backend(backend), CompileOptions(kv_cache=kv_cache)
        report = maker.compile(CompileJob(model, spec, folder, quantization=quantization, form=form, options=options))
        maker.compile_rollback(dims, folder / "rollback", options)
        spec = spec_from_json(report["spec"]) if "spec" in report else spec
        return folder / "graph.onnx", spec, folder / "rollback" / "graph.onnx"

    return make


@pytest.fixture
def open_engine(compiled: Callable[..., Any]) -> Opener:
    def make(
        backend: str = "onnxruntime",
        quantization: str = "none",
        form: str = "fp32",
        role: str = "target",
        max_slots: int = 3,
        max_rows: int = MAX_ROWS,
        tuning: Mapping[str, Any] | None = None,
        kv_cache: str = "auto",
    ) -> Any:
        path, spec, rollback = compiled(backend, quantization, form, role, kv_cache)
        settings = {
            "threads": 1,
            "log_severity": 2,
            **(tuning or {}),
        }  # 2: warnings are printed, see the test on copies
        return registry.backend(backend).load(
            LoadJob(path, spec, max_slots=max_slots, max_rows=max_rows, tuning=settings, rollback=rollback)
        )

    return make
