# SPDX-License-Identifier: Apache-2.0
"""Predicts sizes and memory of a build from config.json alone.

Weights are counted here; the backend predicts their bytes and the memory of a build. An LM head is a linear layer even
where the checkpoint ties it to the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from speccompile.backends.base import Backend
from speccompile.checkpoints.checkpoint import optional_size
from speccompile.checkpoints.layer_sizes import GEMMA4_TYPES
from speccompile.core.dims import DTYPE_BYTES, LayerDims, ModelDims
from speccompile.core.jobs import WeightCounts
from speccompile.core.specs import GraphSpec

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
        weights_bytes: size of the compiled graph's weights.
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
) -> Prediction:
    """Predict a decoder.

    Args:
        backend: whose `predict` is used; None: float32 ONNX graphs.

    Raises:
        CheckpointError: a size in the config is not a positive integer.
    """
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
    counts = WeightCounts(
        num_params, layers + head, embedding + norms + tables, head, is_tied, feed_forward.num_experts
    )
    state_bytes = (2 if backend is None else backend.state_copies) * dims.state_bytes(max_pending)
    cache_bytes = slots * (rows * dims.cache_row_bytes_in(dtype) + state_bytes)
    return predict_counts(counts, quantization, cache_bytes, backend, dtype)


def predict_counts(
    counts: WeightCounts,
    quantization: str,
    cache_bytes: int = 0,
    backend: Backend | None = None,
    dtype: str = "float32",
) -> Prediction:
    """Predict a graph of which the weights are counted.

    Args:
        cache_bytes: key and value caches, all slots and rows.
    """
    from speccompile.backends.predicting import predict_float32

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
