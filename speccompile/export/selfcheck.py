# SPDX-License-Identifier: Apache-2.0
"""Compares a model with our attention and with its own, before it is traced: a few tokens, ours over a cache.

This prevents a wrong export of an unforeseen architecture (position biases, an unusual scale, a prefix mask).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from speccompile.core.dims import ModelDims
from speccompile.errors import ExportError
from speccompile.export.adapters import set_attention
from speccompile.export.attention import IMPLEMENTATION, Frame, forward_pass
from speccompile.export.masks import refuse_faults
from speccompile.export.weights import set_experts
from speccompile.export.wrapper import DecoderGraph
from speccompile.graph_kinds.decoder import decoder_spec

NUM_TOKENS = 7
# Steps of these numbers of tokens, and how many of them recurrent states apply at once: the others wait for the next.
_STEPS = ((4, 4), (2, 0), (1, 1))
RELATIVE_TOLERANCE = 1e-3  # of the largest logit; float32 sums in another order differ by about 1e-6


def check_replacement(graph: DecoderGraph, dims: ModelDims) -> float:
    """Compares cached attention with the model's own; returns the largest difference of logits over the largest one.

    Raises:
        ExportError: they differ by more than `RELATIVE_TOLERANCE`.
    """
    model = graph.model
    tokens = (torch.arange(NUM_TOKENS) * 7 + 3).remainder(dims.vocab_size)[None]
    with torch.no_grad(), refuse_faults(dims.model_type), _one_expert_at_a_time(model):
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


@contextmanager
def _one_expert_at_a_time(model: Any) -> Iterator[None]:
    set_experts(model, "eager")
    try:
        yield
    finally:
        set_experts(model, "batched_mm")


def _run_cached(graph: DecoderGraph, tokens: torch.Tensor, dims: ModelDims) -> torch.Tensor:
    spec = decoder_spec("check", dims, max_pending=NUM_TOKENS)
    shapes = spec.state_shapes(1)
    held = [torch.zeros(shapes[name]) for name in spec.states]
    for name in spec.caches:
        _, heads, _, width = spec.input(name).dims
        held.append(torch.zeros(1, int(heads), NUM_TOKENS, int(width)))
    logits, length, applied = [], 0, 0
    for count, sure in _STEPS:
        chain = torch.ones(1, count, count, dtype=torch.bool).tril()
        step = [torch.tensor([applied]), torch.tensor([sure])] if spec.states else []
        nodes = torch.arange(count)[None]
        new = tokens[:, length : length + count]
        if graph.reads_images:
            step = [torch.zeros(1, count, dtype=torch.bool), torch.zeros(1, count, dims.hidden_size), *step]
        outputs = graph(new, torch.tensor([length]), chain, nodes, [*step, *held])
        logits.append(outputs[0])
        held = list(outputs[-len(held) :])
        applied, length = length + sure, length + count
    return torch.cat(logits, 1)


def _run_own(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    nodes = torch.arange(tokens.shape[1])[None]
    empty = torch.zeros(1, dtype=torch.int64)
    with forward_pass(Frame(empty, torch.zeros(1, 0, 0, dtype=torch.bool), nodes, {})):
        return model(input_ids=tokens, use_cache=False).logits
