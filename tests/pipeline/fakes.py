# SPDX-License-Identifier: Apache-2.0
"""An export and a backend that need neither torch nor onnx, and tiny checkpoints.

The pipeline, the cache, the atomic folders and the manifest are the real ones.
"""

import functools
import json
import struct
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from speccompile.backends.base import Backend, CompileJob, LoadJob
from speccompile.bundle import graphs, report
from speccompile.checkpoints.checkpoint import read_dims
from speccompile.cli import child_build
from speccompile.core import registry, specs
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CompileOptions
from speccompile.core.specs import GraphSpec
from speccompile.graph_kinds.decoder import rollback_spec
from speccompile.prepare import prepare
from speccompile.recipe import BuildPlan, Device, load_recipe, resolve

VOCAB = 32
BACKEND = "onnxruntime"  # the name the fake takes, so that recipes need no other
_git_sha = functools.cache(report.git_sha)


class CountingEngine:
    """Its distribution: the token after t is t + 1. Accepts a chain as far as it counts."""

    def __init__(self, spec: GraphSpec) -> None:
        self.spec = spec

    def run(self, feeds: Mapping[str, np.ndarray], first_slot: int = 0) -> Mapping[str, np.ndarray]:
        tokens = feeds[specs.TOKENS]
        following = (tokens + 1) % VOCAB
        if specs.SCORED_NODES in feeds:
            tokens, following = tokens[:, -1:], following[:, -1:]
        matches = tokens[:, 1:] == following[:, :-1]
        accepted = np.cumprod(matches, axis=1).sum(axis=1)
        after = following[np.arange(len(tokens)), accepted]
        candidates = {
            specs.CANDIDATES: following[:, :, None],
            specs.CANDIDATE_PROBS: np.full((*following.shape, 1), 0.5, np.float32),
            specs.NODE_PROBS: np.eye(VOCAB, dtype=np.float32)[following],
        }
        return {specs.NUM_ACCEPTED: accepted, specs.NEXT_TOKEN: after, **candidates}


class FakeBackend(Backend):
    """Writes the name of what it was given."""

    name = BACKEND
    quantizations = ("none", "int8", "int4")
    graph_sources = ()
    weights_bytes = 1000

    def compile(self, job: CompileJob) -> dict[str, Any]:
        assert job.progress is not None
        job.progress("attach_tail")
        (job.dest / "graph.onnx").write_text(f"{job.spec.name} {job.model} {job.quantization}")
        (job.dest / "graph.onnx.data").write_bytes(bytes(self.weights_bytes))
        job.progress("save")
        return {"form": "fp32", "forms_measured": {}, "passes": [], "op_histogram": {"before": {"A": 2}, "after": {}}}

    def compile_rollback(self, dims: ModelDims, dest: Path, options: CompileOptions | None = None) -> GraphSpec:
        dest.mkdir()
        (dest / "graph.onnx").write_text("rollback")
        return rollback_spec(dims)

    def tune(self, job: LoadJob) -> dict[str, Any]:
        assert job.path.exists()
        return {"threads": job.threads or 1, "step_ms": {"1": 1.0}}

    def load(self, job: LoadJob) -> CountingEngine:  # type: ignore[override]
        assert job.path.exists()
        return CountingEngine(job.spec)


def install(set_attribute: Callable[[Any, str, Any], None], set_module: Callable[[str, Any], None]) -> list[Path]:
    """Put the fakes in place; returns the list that every export appends its folder to."""
    exported: list[Path] = []

    def export_decoder(source: Path, *, progress: Callable[[str], None], **_: Any) -> tuple[str, ModelDims]:
        exported.append(source)
        progress("trace")
        return f"model of {source.name}", replace(read_dims(source), num_params=123)

    export = types.ModuleType("speccompile.export.decoder")
    export.export_decoder = export_decoder  # type: ignore[attr-defined]
    set_module(export.__name__, export)
    here = types.ModuleType("backend_of_the_pipeline_tests")
    here.FakeBackend = FakeBackend  # type: ignore[attr-defined]
    set_module(here.__name__, here)
    set_attribute(registry, "BACKENDS", {BACKEND: f"{here.__name__}:FakeBackend"})
    set_attribute(report, "git_sha", _git_sha)
    set_attribute(child_build, "prepare_in_child", prepare)  # a child would have the real ones
    set_attribute(graphs, "gc", types.SimpleNamespace(collect=lambda: 0))  # their graphs are small
    return exported


def install_for_good() -> list[Path]:
    """`install` for a process of its own."""
    return install(setattr, sys.modules.__setitem__)


def make_checkpoint(folder: Path, *, hidden: int = 8, layers: int = 2, vocab: int = VOCAB, seed: int = 0) -> Path:
    """A Llama of a few hundred parameters with random weights and a tokenizer of one word an id."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(vocab)))
    head = hidden // 2
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": (head, hidden),
            f"{prefix}self_attn.v_proj.weight": (head, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}mlp.gate_proj.weight": (2 * hidden, hidden),
            f"{prefix}mlp.up_proj.weight": (2 * hidden, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, 2 * hidden),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
    write_safetensors(folder / "model.safetensors", shapes, seed)
    return folder


def write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    header, chunks, offset = {}, [], 0
    for name, shape in shapes.items():
        data = (rng.standard_normal(shape) * 0.1).astype(np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def tokenizer(vocab: int) -> dict[str, Any]:
    """A tokenizers file of `vocab` words."""
    words = {f"w{i}": i for i in range(vocab)}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }


def write_recipe(folder: Path) -> Path:
    """A pair of tiny checkpoints and a recipe for it."""
    make_checkpoint(folder / "big")
    make_checkpoint(folder / "small", hidden=4, layers=1, seed=1)
    recipe = folder / "pair.yaml"
    recipe.write_text(
        "target: {model: big}\nspeculator: {method: draft_model, model: small}\n"
        "engine: {max_seq_len: 48, max_draft_nodes: 8}\n"
    )
    return recipe


def make_plan(recipe: Path, *overrides: str) -> BuildPlan:
    return resolve(load_recipe(recipe, overrides), Device("cpu", 2))
