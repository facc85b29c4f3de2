# SPDX-License-Identifier: Apache-2.0
"""Compares a model with our attention and with its own, before it is traced.

This prevents a wrong export of an unforeseen architecture (position biases, an unusual scale, a prefix mask): a few
tokens go through both, ours in two steps over a cache.
"""

from __future__ import annotations

from typing import Any

import torch

from speccompile.core.dims import ModelDims
from speccompile.errors import ExportError
from speccompile.export.adapters import set_attention
from speccompile.export.attention import IMPLEMENTATION, Frame, forward_pass
from speccompile.export.masks import refuse_faults
from speccompile.export.wrapper import DecoderGraph

NUM_TOKENS = 7
_NUM_PREFILLED = 4
RELATIVE_TOLERANCE = 1e-3  # of the largest logit; float32 sums in another order differ by about 1e-6


def check_replacement(graph: DecoderGraph, dims: ModelDims) -> float:
    """Compare cached attention with the model's own.

    Returns:
        The largest difference of two logits over the largest logit.

    Raises:
        ExportError: they differ by more than `RELATIVE_TOLERANCE`.
    """
    model = graph.model
    tokens = (torch.arange(NUM_TOKENS) * 7 + 3).remainder(dims.vocab_size)[None]
    with torch.no_grad(), refuse_faults(dims.model_type):
        ours = _run_cached(graph, tokens, dims)
        set_attention(model, "eager")
        try:
            own = _run_own(model, tokens)
        finally:
            set_attention(model, IMPLEMENTATION)
    difference = float((ours - own).abs().max() / own.abs().max().clamp_min(1e-20))
    if not difference <= RELATIVE_TOLERANCE:  # NaN counts as a difference
        raise ExportError(
            dims.model_type,
            f"logits that differ by {difference:.1e} of the largest from transformers' own",
            f"at most {RELATIVE_TOLERANCE:.0e}",
            "Its attention is none that CachedAttention expresses; this architecture cannot be exported.",
        )
    return difference


def _run_cached(graph: DecoderGraph, tokens: torch.Tensor, dims: ModelDims) -> torch.Tensor:
    shape = (1, dims.num_kv_heads, NUM_TOKENS, dims.head_dim)
    caches = [torch.zeros(shape) for _ in range(2 * dims.num_layers)]
    logits = []
    for start, end in ((0, _NUM_PREFILLED), (_NUM_PREFILLED, NUM_TOKENS)):
        count = end - start
        chain = torch.ones(1, count, count, dtype=torch.bool).tril()
        outputs = graph(tokens[:, start:end], torch.tensor([start]), chain, torch.arange(count)[None], caches)
        logits.append(outputs[0])
        caches = list(outputs[-2 * dims.num_layers :])
    return torch.cat(logits, 1)


def _run_own(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    nodes = torch.arange(tokens.shape[1])[None]
    empty = torch.zeros(1, dtype=torch.int64)
    with forward_pass(Frame(empty, torch.zeros(1, 0, 0, dtype=torch.bool), nodes, [])):
        return model(input_ids=tokens, use_cache=False).logits
