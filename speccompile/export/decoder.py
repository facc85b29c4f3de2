# SPDX-License-Identifier: Apache-2.0
"""A transformers causal language model -> the neutral graph of `decoder_spec`.

Before it is traced, a model with our attention is compared with its own on a few tokens: this prevents a wrong export
of an unforeseen architecture (position biases, an unusual scale, a prefix mask).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from speccompile.checkpoints.checkpoint import check_checkpoint, read_config, read_dims
from speccompile.checkpoints.config_values import check_config
from speccompile.checkpoints.lora import LoraAdapter, stack_factors
from speccompile.core.dims import ModelDims
from speccompile.core.specs import CONV_ROWS, PENDING, GraphSpec
from speccompile.errors import ExportError
from speccompile.export import attention
from speccompile.export.adapted_models import set_attention
from speccompile.export.attention import IMPLEMENTATION, Frame, forward_pass
from speccompile.export.draft_vocab import cut_head
from speccompile.export.layer_changes import replace_layers
from speccompile.export.lora import check_lora
from speccompile.export.masks import read_windows, refuse_faults
from speccompile.export.trace import trace_module
from speccompile.export.weights import Weights, check_positions, load_model, name_weights, names_by_address, set_experts
from speccompile.export.wrapper import DecoderGraph
from speccompile.graph_kinds.decoder import decoder_spec
from speccompile.passes.attach_adapters import attach_adapters
from speccompile.passes.base import Pass, pass_of, run_pipeline
from speccompile.passes.cleanup import remove_dead, share_common_subexpressions
from speccompile.passes.drop_windows import drop_windows
from speccompile.passes.edit import OPS_DOMAIN, attentions_of, nodes_of, shared_attentions_of
from speccompile.passes.fold_weights import fold_weights
from speccompile.passes.fuse_gelu import fuse_gelu
from speccompile.passes.fuse_rms_norm import fuse_rms_norm
from speccompile.passes.fuse_rope import fuse_rope
from speccompile.passes.simplify_reshapes import simplify_reshapes
from speccompile.passes.split_slices import split_slices
from speccompile.passes.tabulate_rope import tabulate_rope_pass
from speccompile.passes.unflatten_linears import unflatten_linears


def cleanup_table(max_seq_len: int) -> tuple[Pass, ...]:
    """Returns the passes from torch's trace to the neutral graph, with norms and rotary embeddings as single nodes."""
    return (
        remove_dead,
        share_common_subexpressions,
        fuse_rms_norm,
        fuse_rope,
        fuse_gelu,
        pass_of(drop_windows, max_seq_len),
        tabulate_rope_pass(max_seq_len),
        unflatten_linears,
        split_slices,
        simplify_reshapes,
        fold_weights,
        share_common_subexpressions,
        remove_dead,
    )


def export_decoder(
    source: Path,
    *,
    weights: Weights = "checkpoint",
    max_seq_len: int,
    hidden: bool = False,
    hidden_layers: tuple[int, ...] = (),
    image_tokens: int = 0,
    lora: LoraAdapter | None = None,
    adapters: Sequence[LoraAdapter] = (),
    prepare: Callable[[Any, ModelDims], ModelDims] | None = None,
    kept_tokens: Sequence[int] = (),
    progress: Callable[[str], None] | None = None,
) -> tuple[ir.Model, ModelDims]:
    """Traces the model in `source` and cleans the trace.

    Args:
        source: a checkpoint folder; with random weights its config.json is enough.
        hidden: whether `hidden` (what the LM head reads) is an output.
        hidden_layers: layers after which the residual stream is an output.
        image_tokens: tokens of an image, whose rows are inputs; 0: no images are read.
        prepare: changes the loaded model in place; takes its sizes and returns the new ones.
        kept_tokens: the LM head keeps the rows of these tokens alone, and others have no chance; empty: all.

    Returns:
        The model (opset 24 and the domain speccompile; weights refer to torch's memory) and the decoder's sizes.
    """
    say = progress or (lambda stage: None)
    check_config(read_config(source), max_seq_len)
    dims = read_dims(source)
    _check_hidden_layers(dims, hidden_layers)
    if weights == "checkpoint":
        say("check weights")
        check_checkpoint(source, dims)
    say("load weights")
    attention.register()
    model = load_model(source, weights, lora)
    check_positions(model, max_seq_len)
    for adapter in adapters:
        check_lora(model, adapter)
    if prepare is not None:
        dims = prepare(model, dims)
    if kept_tokens:
        cut_head(model, kept_tokens)
    dims = replace(dims, num_params=sum(p.numel() for p in model.parameters()))
    spec = decoder_spec("decoder", dims, hidden=hidden, hidden_layers=hidden_layers, image_tokens=image_tokens)
    replace_layers(model)
    names = names_by_address(model)
    say("compare attention")
    windows = read_windows(model, attention.IMPLEMENTATION, dims.num_layers, max_seq_len, dims.model_type)
    module = DecoderGraph(model, dims, hidden, hidden_layers, windows, image_tokens > 0)
    check_replacement(module, dims)
    if kept_tokens:
        module.spread_from(kept_tokens)
    say("trace")
    graph = _trace(module, dims, spec)
    name_weights(graph, names)
    attached = (pass_of(attach_adapters, stack_factors(adapters)),) if adapters else ()
    run_pipeline(graph, (*cleanup_table(max_seq_len), *attached), say)
    _check_attention(graph, dims)
    return graph, dims


def _check_hidden_layers(dims: ModelDims, hidden_layers: tuple[int, ...]) -> None:
    wrong = [i for i in hidden_layers if not 0 <= i < dims.num_layers]
    if wrong or len(set(hidden_layers)) != len(hidden_layers):
        raise ExportError(
            "hidden_layers",
            str(list(hidden_layers)),
            f"different layers between 0 and {dims.num_layers - 1}",
            "Choose layers that the model has.",
        )


def _trace(module: DecoderGraph, dims: ModelDims, spec: GraphSpec) -> ir.Model:
    batch, nodes, scored, max_seq = (torch.export.Dim(n, min=1) for n in ("batch", "nodes", "scored", "max_seq"))
    # Sizes of the example: none is 0 or 1, which torch would treat as constants.
    sizes = {"batch": 2, "nodes": 3, "max_seq": 16, PENDING: 3, CONV_ROWS: 5}
    dynamic = {"batch": batch, "nodes": nodes, "max_seq": max_seq}
    dynamic |= {name: torch.export.Dim(name, min=1) for name in (PENDING, CONV_ROWS)}
    held = spec.inputs[4:]  # after tokens, lengths, tree_mask and scored_nodes
    dtypes = {"int64": torch.int64, "float32": torch.float32, "bool": torch.bool}
    example = (
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64),
        torch.ones(2, 3, 3, dtype=torch.bool),
        torch.zeros(2, 2, dtype=torch.int64),
        [torch.zeros([sizes[d] if isinstance(d, str) else d for d in t.dims], dtype=dtypes[t.dtype]) for t in held],
    )
    shapes = (
        {0: batch, 1: nodes},
        {0: batch},
        {0: batch, 1: nodes, 2: nodes},
        {0: batch, 1: scored},
        [{axis: dynamic[d] for axis, d in enumerate(t.dims) if isinstance(d, str)} for t in held],
    )
    return trace_module(module, example, shapes, spec, dims.model_type)


def _check_attention(model: ir.Model, dims: ModelDims) -> None:
    with_state = [kept for layer in dims.per_layer if (kept := layer.recurrent) is not None and kept.has_state]
    counts: dict[str, tuple[int, Sequence[object]]] = {
        "cached attentions": (len(attentions_of(model)), dims.attention_layers),
        "attentions to another layer's caches": (len(shared_attentions_of(model)), tuple(dims.sources)),
        "GatedDelta nodes": (len(nodes_of(model, "GatedDelta", OPS_DOMAIN)), with_state),
        "ConvRows nodes": (len(nodes_of(model, "ConvRows", OPS_DOMAIN)), dims.recurrent_layers),
    }
    for what, (count, layers) in counts.items():
        if count != len(layers):
            raise ExportError(
                dims.model_type,
                f"{count} {what}",
                f"one for each of {len(layers)} layers",
                "Its layers cannot be replaced; this architecture cannot be exported.",
            )


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
