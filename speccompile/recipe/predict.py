# SPDX-License-Identifier: Apache-2.0
"""Sizes and memory of a build before it is made, from config.json alone.

The figures follow the layout of the compiled graphs: embeddings stay in float32, linear layers have the recipe's
weight form, and an LM head is a linear layer even where the checkpoint ties it to the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from speccompile.core.jobs import WeightCounts
from speccompile.core.specs import ModelDims

# Bytes of a weight, in the larger one of its kernel forms: a block of 32 has one float32 scale.
_WEIGHT_BYTES = {"none": 4.0, "int8": 1 + 4 / 32, "int4": 0.5 + 4 / 32}
_FLOAT_BYTES = 4
# Families whose feed-forward has two matrices; the others gate it with a third.
_UNGATED = frozenset({"gpt2", "gpt_neox", "opt", "starcoder2", "phi", "gpt_neo", "gptj", "codegen"})
_LEARNED_POSITIONS = frozenset({"gpt2", "opt", "gpt_neo"})
# Beside torch's copy an export holds what passes rewrite (at most 0.3 of the weights) and the libraries themselves.
_EXPORT_FACTOR, _LIBRARY_BYTES = 2.3, 700 * 2**20


@dataclass(frozen=True)
class Prediction:
    """What one decoder will need.

    Args:
        num_params: parameters of the checkpoint.
        num_linear: weights in linear layers of the graph, the LM head included.
        weights_bytes: size of the compiled graph's weights.
        cache_bytes: key and value caches, all slots and rows.
        build_peak_bytes: resident memory while it is exported.
    """

    num_params: int
    num_linear: int
    weights_bytes: int
    cache_bytes: int
    build_peak_bytes: int

    def json_from_prediction(self) -> dict[str, int]:
        """A JSON-ready dict."""
        return asdict(self)


def predict(config: Mapping[str, Any], dims: ModelDims, quantization: str, slots: int, rows: int) -> Prediction:
    """Predict a decoder.

    Args:
        config: parsed config.json.
        dims: its sizes.
        quantization: none, int8 or int4.
        slots: sequences decoded at once.
        rows: cache rows of each.
    """
    head = dims.vocab_size * dims.hidden_size
    layers = dims.num_layers * (_attention(dims) + _feed_forward(config, dims))
    embedding = head
    if dims.model_type in _LEARNED_POSITIONS:
        embedding += dims.max_positions * dims.hidden_size
    norms = (2 * dims.num_layers + 1) * dims.hidden_size
    num_params = layers + embedding + norms + (0 if _is_tied(config, dims) else head)
    num_linear = layers + head
    # Sine and cosine of every position are tables in the graph.
    tables = 0 if dims.model_type in _LEARNED_POSITIONS else rows * dims.head_dim
    counts = WeightCounts(num_params, num_linear, embedding + norms + tables)
    return predict_counts(counts, quantization, slots * rows * dims.cache_row_bytes)


def predict_counts(counts: WeightCounts, quantization: str, cache_bytes: int = 0) -> Prediction:
    """Predict a graph of which the weights are counted.

    Args:
        counts: its weights.
        quantization: none, int8 or int4.
        cache_bytes: key and value caches, all slots and rows.
    """
    weights_bytes = int(counts.num_linear * _WEIGHT_BYTES[quantization]) + _FLOAT_BYTES * counts.num_plain
    build_peak_bytes = int(counts.num_params * _FLOAT_BYTES * _EXPORT_FACTOR) + _LIBRARY_BYTES
    return Prediction(counts.num_params, counts.num_linear, weights_bytes, cache_bytes, build_peak_bytes)


def _attention(dims: ModelDims) -> int:
    queries, keys = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    return dims.hidden_size * (2 * queries + 2 * keys)


def _feed_forward(config: Mapping[str, Any], dims: ModelDims) -> int:
    inner = config.get("intermediate_size") or config.get("n_inner") or config.get("ffn_dim") or 4 * dims.hidden_size
    matrices = 2 if dims.model_type in _UNGATED else 3
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    if experts == 1:
        return matrices * dims.hidden_size * inner
    inner = config.get("moe_intermediate_size") or inner
    return experts * (matrices * dims.hidden_size * inner + dims.hidden_size)


def _is_tied(config: Mapping[str, Any], dims: ModelDims) -> bool:
    # A config leaves the key out where it has the family's default.
    default = dims.model_type in {"gpt2", "opt", "gemma", "gemma2", "gemma3_text", "starcoder2", "smollm3"}
    return bool(config.get("tie_word_embeddings", default))
