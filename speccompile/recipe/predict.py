# SPDX-License-Identifier: Apache-2.0
"""Predicts sizes and memory of a build from config.json alone: the backend makes bytes of the counted weights.

An LM head is a linear layer even where the checkpoint ties it to the embedding.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speccompile.backends.base import Backend
from speccompile.backends.machine import available_memory, gpu_memory
from speccompile.checkpoints.checkpoint import optional_size
from speccompile.checkpoints.layer_sizes import GEMMA4_TYPES
from speccompile.core.dims import DTYPE_BYTES, LayerDims, ModelDims
from speccompile.core.jobs import WeightCounts
from speccompile.core.specs import GraphSpec
from speccompile.recipe.plan import BuildPlan

# Families whose feed-forward has two matrices; the others gate it with a third.
_UNGATED = frozenset({
    "apertus", "arcee", "biogpt", "bloom", "codegen", "ctrl", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
    "gpt_neox_japanese", "gptj", "jais2", "nanochat", "nemotron", "openai-gpt", "opt", "persimmon", "phi",
    "starcoder2", "xglm",
})  # fmt: skip
_CONFIG = "config.json"
_TIED = frozenset({
    "biogpt", "bloom", "cohere", "cohere2", "cohere2_moe", "ctrl", "ernie4_5", "ernie4_5_moe", "falcon", "gemma",
    "gemma2", "gemma3_text", *GEMMA4_TYPES, "gpt2", "gpt_bigcode", "gpt_neo", "jetmoe", "lfm2", "modernbert-decoder",
    "openai-gpt", "opt", "smollm3", "starcoder2", "vaultgemma", "xglm", "zamba2",
})  # fmt: skip
_LEARNED_POSITIONS = frozenset({"biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt"})


@dataclass(frozen=True)
class Prediction:
    """Predicted sizes of one decoder.

    Args:
        num_linear: weights in linear layers of the graph, the LM head included.
        file_bytes: of the compiled graph, weights included; in the largest form that may be chosen.
        cache_bytes: key and value caches, all slots and rows; recurrent states, with a snapshot for each slot.
        export_peak_bytes: resident memory while it is exported and lowered.
        builder_peak_bytes: resident memory of a builder's own process; 0 where there is none.
    """

    num_params: int
    num_linear: int
    weights_bytes: int
    file_bytes: int
    least_file_bytes: int
    cache_bytes: int
    export_peak_bytes: int
    builder_peak_bytes: int
    build_peak_bytes: int

    def json_from_prediction(self) -> dict[str, int]:
        return asdict(self)


def predict(
    config: Mapping[str, Any],
    dims: ModelDims,
    quantization: str,
    slots: int,
    rows: int,
    backend: Backend | None = None,
    dtype: str = "float32",
    max_pending: int = 1,
    kv_cache: str = "auto",
) -> Prediction:
    """Predict a decoder. `backend`: whose `predict` is used; None: float32 ONNX graphs."""
    counts = count_weights(config, dims, rows)
    state_bytes = (2 if backend is None else backend.state_copies) * dims.state_bytes(max_pending)
    cache_bytes = slots * (rows * dims.cache_row_bytes_in(dtype if kv_cache == "auto" else kv_cache) + state_bytes)
    return predict_counts(counts, quantization, cache_bytes, backend, dtype)


def count_weights(config: Mapping[str, Any], dims: ModelDims, rows: int = 0) -> WeightCounts:
    """Returns how many weights a decoder's graph has, with tables of positions for `rows` rows."""
    head = dims.vocab_size * dims.hidden_size
    feed_forward = _feed_forward(config, dims)
    layers = _attention(dims) + feed_forward.num_dense + feed_forward.num_experts
    by_layer = dims.num_layers * (config.get("hidden_size_per_layer_input") or 0)
    embedding = head + by_layer * (config.get("vocab_size_per_layer_input") or 0)
    layers += 3 * by_layer * dims.hidden_size  # into and out of each layer, and the projection of the embedding
    if dims.model_type in _LEARNED_POSITIONS:
        embedding += dims.max_positions * dims.hidden_size
    norms = (2 * dims.num_layers + 1) * dims.hidden_size + feed_forward.num_routers
    is_tied = _is_tied(config, dims)
    num_params = layers + embedding + norms + (0 if is_tied else head)
    # Sine and cosine of every position are tables in the graph.
    tables = 0 if dims.model_type in _LEARNED_POSITIONS else rows * dims.head_dim
    return WeightCounts(num_params, layers + head, embedding + norms + tables, head, is_tied, feed_forward.num_experts)


def predict_counts(
    counts: WeightCounts,
    quantization: str,
    cache_bytes: int = 0,
    backend: Backend | None = None,
    dtype: str = "float32",
) -> Prediction:
    """Predict a graph of which the weights are counted. `cache_bytes`: key and value caches, all slots and rows."""
    from speccompile.backends.base import predict_float32

    sizes = predict_float32(counts, quantization) if backend is None else backend.predict(counts, quantization, dtype)
    return Prediction(
        num_params=counts.num_params,
        num_linear=counts.num_linear,
        weights_bytes=sizes.weights_bytes,
        file_bytes=sizes.file_bytes,
        least_file_bytes=sizes.file_bytes if sizes.least_file_bytes is None else sizes.least_file_bytes,
        cache_bytes=cache_bytes,
        export_peak_bytes=sizes.export_peak_bytes,
        builder_peak_bytes=sizes.builder_peak_bytes,
        build_peak_bytes=max(sizes.export_peak_bytes, sizes.builder_peak_bytes),
    )


def own_cache_bytes(spec: GraphSpec, slots: int, rows: int, dtype: str) -> int:
    """Returns the bytes of the caches that a draft's graph owns; those that it borrows are its target's."""
    columns = sum(math.prod(d for d in spec.input(n).dims if isinstance(d, int)) for n in spec.own_caches)
    return slots * rows * columns * DTYPE_BYTES[dtype]


def _attention(dims: ModelDims) -> int:
    return sum(_mixer(dims, layer) for layer in dims.per_layer)


def _mixer(dims: ModelDims, layer: LayerDims) -> int:
    if layer.source is not None:  # Q and the output alone
        return dims.hidden_size * 2 * dims.num_heads * dims.per_layer[layer.source].head_dim
    heads = dims.num_heads + layer.num_kv_heads if layer.num_kv_heads else 0
    attention = dims.hidden_size * 2 * heads * layer.head_dim
    if (sizes := layer.recurrent) is None:
        return attention
    values = sizes.num_value_heads * sizes.value_dim
    gates = 2 * values + 2 * sizes.num_value_heads  # z and the output; g and beta
    if not sizes.has_state:
        gates = 3 * sizes.conv_channels  # what gates its input and its output; the output
    return attention + dims.hidden_size * (sizes.conv_channels + gates) + sizes.conv_channels * sizes.conv_kernel


@dataclass(frozen=True)
class _FeedForward:
    """Weights of all feed-forward layers: of dense ones and shared experts, of chosen experts, of their routers."""

    num_dense: int
    num_experts: int = 0
    num_routers: int = 0


def _feed_forward(config: Mapping[str, Any], dims: ModelDims) -> _FeedForward:
    inner = optional_size(_CONFIG, config, ("intermediate_size", "n_inner", "ffn_dim"), 4 * dims.hidden_size)
    unit = (2 if dims.model_type in _UNGATED else 3) * dims.hidden_size  # weights for each inner column
    experts = optional_size(_CONFIG, config, ("num_local_experts", "num_experts", "n_routed_experts"), 1)
    if experts == 1:
        num_wide = len(dims.sources) if config.get("use_double_wide_mlp") else 0
        return _FeedForward((dims.num_layers + num_wide) * unit * inner)
    own = optional_size(_CONFIG, config, ("moe_intermediate_size",), inner)
    num_first = config.get("first_k_dense_replace") or 0
    layers = dims.num_layers - num_first
    num_shared = config.get("n_shared_experts") or 0
    shared = (config.get("shared_expert_intermediate_size") or 0) + num_shared * own
    beside = layers if config.get("enable_moe_block") else 0  # layers with a dense MLP beside their experts
    dense = (num_first + beside) * unit * inner + layers * unit * shared
    return _FeedForward(dense, layers * experts * unit * own, layers * experts * dims.hidden_size)


def _is_tied(config: Mapping[str, Any], dims: ModelDims) -> bool:
    # A config lacks the key where it has the family's default.
    default = dims.model_type in _TIED
    return bool(config.get("tie_word_embeddings", default))


# Of 41 builds of published sizes with few layers (docs/reference/pairs.md), on two shared cores, four in five took this
# long for each GiB of float32 weights; a small build takes its time to measure steps.
_SECONDS_PER_GIB = (45, 430)
_SECONDS = (20, 120)
TIME_BASIS = "as 41 builds on two busy cores: 45 to 430 s for each GiB of float32 weights; calibration comes on top"


def build_seconds(plan: BuildPlan, predicted: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns how long a build takes, from and to, or None, by {"graphs": {name: {"num_params"}}}."""
    if plan.engine.backend != "onnxruntime":
        return None
    gib = 4 * sum(graph["num_params"] for graph in predicted["graphs"].values()) / 2**30
    low, high = (round(base + rate * gib) for base, rate in zip(_SECONDS, _SECONDS_PER_GIB, strict=True))
    return low, high


def compare(plan: BuildPlan, predicted: Mapping[str, Any], disks: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Returns {"what", "where", "needed_bytes", "free_bytes" or None, "todo"} of memory and disks.

    Args:
        predicted: its sizes: {"total": {"build_peak_bytes", "runtime_bytes", "bundle_bytes"}}.
        disks: folders by what is written there, as much as the bundle is large; they need not exist.
    """
    total = predicted["total"]
    is_gpu = plan.engine.device == "cuda"
    free = available_memory() or None
    rows = [("building", "memory", total["build_peak_bytes"], free, "Build on a larger machine.")]
    home = ("the GPU's memory", gpu_memory()) if is_gpu else ("memory", free)
    todo = "Quantise, or lower engine.max_batch_size or engine.max_seq_len."
    rows.append(("decoding", home[0], total["runtime_bytes"], home[1], todo))
    by_disk: dict[int, list[str]] = {}
    for name, folder in disks.items():
        by_disk.setdefault(os.stat(_existing(folder)).st_dev, []).append(name)
    for names in by_disk.values():
        where = _existing(disks[names[0]])
        needed, todo = len(names) * total["bundle_bytes"], "Free space, or choose another disk (-o, SPECCOMPILE_CACHE)."
        rows.append((" and ".join(names), f"the disk of {where}", needed, _free(where), todo))
    keys = ("what", "where", "needed_bytes", "free_bytes", "todo")
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _existing(folder: Path) -> Path:
    whole = folder.absolute()
    return next(path for path in (whole, *whole.parents) if path.is_dir())


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free
