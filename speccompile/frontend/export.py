# SPDX-License-Identifier: Apache-2.0
"""A transformers causal language model -> the neutral graph of `decoder_spec`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx import defs
from onnxscript import values

from speccompile.core.specs import GraphSpec, ModelDims, TensorSpec, decoder_spec
from speccompile.errors import ExportError
from speccompile.frontend import attention
from speccompile.frontend.checkpoint import check_checkpoint, read_config, read_dims
from speccompile.frontend.families import check_config
from speccompile.frontend.selfcheck import check_replacement
from speccompile.frontend.weights import Weights, check_positions, load_model, name_weights, names_by_address
from speccompile.frontend.wrapper import DecoderGraph
from speccompile.ops.cached_attention import CACHED_ATTENTION
from speccompile.ops.op import DOMAIN, OPSET, VERSION, Op
from speccompile.passes.base import Pass, run_pipeline
from speccompile.passes.cleanup import REMOVE_DEAD, SHARE_COMMON
from speccompile.passes.drop_windows import drop_windows_pass
from speccompile.passes.fold_weights import FOLD_WEIGHTS
from speccompile.passes.fuse_gelu import FUSE_GELU
from speccompile.passes.fuse_rms_norm import FUSE_RMS_NORM
from speccompile.passes.fuse_rope import FUSE_ROPE
from speccompile.passes.simplify_reshapes import SIMPLIFY_RESHAPES
from speccompile.passes.split_slices import SPLIT_SLICES
from speccompile.passes.tabulate_rope import tabulate_rope_pass
from speccompile.passes.unflatten_linears import UNFLATTEN_LINEARS

IR_VERSION = 12  # of ONNX 1.19, the first with opset 24


def cleanup_table(max_seq_len: int) -> tuple[Pass, ...]:
    """The passes from torch's trace to the neutral graph, where norms and rotary embeddings are single nodes."""
    return (
        REMOVE_DEAD,
        SHARE_COMMON,
        FUSE_RMS_NORM,
        FUSE_ROPE,
        FUSE_GELU,
        drop_windows_pass(max_seq_len),
        tabulate_rope_pass(max_seq_len),
        UNFLATTEN_LINEARS,
        SPLIT_SLICES,
        SIMPLIFY_RESHAPES,
        FOLD_WEIGHTS,
        SHARE_COMMON,
        REMOVE_DEAD,
    )


def export_decoder(
    source: Path,
    *,
    weights: Weights = "checkpoint",
    max_seq_len: int,
    hidden: bool = False,
    hidden_layers: tuple[int, ...] = (),
    progress: Callable[[str], None] | None = None,
) -> tuple[ir.Model, ModelDims]:
    """Trace the model in `source` and clean the trace.

    Args:
        source: a checkpoint folder; with random weights its config.json is enough.
        weights: "checkpoint" or "random".
        max_seq_len: rows of the cache; no position reaches beyond.
        hidden: whether `hidden` (what the LM head reads) is an output.
        hidden_layers: layers whose residual stream behind them is an output.
        progress: called with the name of each stage as it begins.

    Returns:
        The model (opset 24 and the domain speccompile; its inputs and outputs are those of `decoder_spec`;
        weights refer to torch's memory) and the decoder's sizes.

    Raises:
        CheckpointError: the folder is incomplete or damaged.
        ExportError: the architecture cannot be expressed.
    """
    say = progress or (lambda stage: None)
    dims = read_dims(source)
    check_config(read_config(source), max_seq_len)
    _check_hidden_layers(dims, hidden_layers)
    if weights == "checkpoint":
        say("check weights")
        check_checkpoint(source, dims)
    say("load weights")
    attention.register()
    model = load_model(source, weights)
    check_positions(model, max_seq_len)
    dims = replace(dims, num_params=sum(p.numel() for p in model.parameters()))
    spec = decoder_spec("decoder", dims, hidden=hidden, hidden_layers=hidden_layers)
    names = names_by_address(model)
    module = DecoderGraph(model, dims.num_layers, hidden, hidden_layers)
    say("compare attention")
    check_replacement(module, dims)
    say("trace")
    graph = _trace(module, dims)
    _declare_io(graph, spec)
    _drop_metadata(graph)
    name_weights(graph, names)
    run_pipeline(graph, cleanup_table(max_seq_len), say)
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


def _trace(module: DecoderGraph, dims: ModelDims) -> ir.Model:
    batch, nodes, scored, max_seq = (torch.export.Dim(n, min=1) for n in ("batch", "nodes", "scored", "max_seq"))
    num_caches = 2 * dims.num_layers
    # Sizes of the example: none is 0 or 1, which torch would take for constants.
    caches = [torch.zeros(2, dims.num_kv_heads, 16, dims.head_dim) for _ in range(num_caches)]
    example = (
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64),
        torch.ones(2, 3, 3, dtype=torch.bool),
        torch.zeros(2, 2, dtype=torch.int64),
        caches,
    )
    shapes = (
        {0: batch, 1: nodes},
        {0: batch},
        {0: batch, 1: nodes, 2: nodes},
        {0: batch, 1: scored},
        [{0: batch, 2: max_seq}] * num_caches,
    )
    with _quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                module,
                example,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=shapes,
                custom_translation_table=_translations(),
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as fault:
            raise ExportError(
                dims.model_type,
                f"a failed trace: {_first_cause(fault)}",
                "a forward pass that torch.export and its ONNX translation can follow",
                "This architecture cannot be exported.",
            ) from fault
    assert program is not None
    return program.model


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's exporter, which warns of its own internals and of packages it could use."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _first_cause(fault: BaseException) -> str:
    while fault.__cause__ is not None:
        fault = fault.__cause__
    lines = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {lines[0] if lines else 'no message'}"


def _translations() -> dict[Any, Callable[..., Any]]:
    _declare_schema(CACHED_ATTENTION)
    ours, standard = values.Opset(DOMAIN, VERSION), values.Opset("", OPSET)

    def cached_attention(q, k, v, k_cache, v_cache, lengths, tree_mask, scale, softcap, window):  # type: ignore[no-untyped-def]
        inputs = (q, k, v, k_cache, v_cache, lengths, tree_mask)
        return ours.CachedAttention(*inputs, scale=scale, softcap=softcap, window=window)

    def gather_nodes(x, nodes):  # type: ignore[no-untyped-def]
        indices = standard.Unsqueeze(nodes, standard.Constant(value_ints=[2]))
        return standard.GatherND(x, indices, batch_dims=1)

    ops = torch.ops.speccompile
    return {ops.cached_attention.default: cached_attention, ops.gather_nodes.default: gather_nodes}


def _declare_schema(op: Op) -> None:
    """Tell onnx of an op of ours, which torch's exporter insists on; once a process."""
    if defs.has(op.name, VERSION, DOMAIN):
        return
    kinds = {float: defs.OpSchema.AttrType.FLOAT, int: defs.OpSchema.AttrType.INT}

    def parameters(tensors: tuple[TensorSpec, ...]) -> list[Any]:
        types = {"float32": "tensor(float)", "int64": "tensor(int64)", "bool": "tensor(bool)"}
        return [defs.OpSchema.FormalParameter(t.name, types[t.dtype]) for t in tensors]

    attributes = [defs.OpSchema.Attribute(n, kinds[type(v)], "", required=False) for n, v in op.attributes.items()]
    sides = {"inputs": parameters(op.inputs), "outputs": parameters(op.outputs)}
    defs.register_schema(defs.OpSchema(op.name, DOMAIN, VERSION, **sides, attributes=attributes))


def _declare_io(model: ir.Model, spec: GraphSpec) -> None:
    """Give inputs and outputs the names and dims of `spec`."""
    model.graph.name = spec.name
    for held, wanted, kind in (
        (model.graph.inputs, spec.inputs, "inputs"),
        (model.graph.outputs, spec.outputs, "outputs"),
    ):
        if len(held) != len(wanted):
            raise ExportError(
                spec.name,
                f"{len(held)} {kind}",
                f"{len(wanted)} {kind}",
                "This is a fault of the exporter: report it with the model's config.",
            )
        for value, tensor in zip(held, wanted, strict=True):
            _check_dims(value, tensor)
            value.name, value.shape = tensor.name, ir.Shape(list(tensor.dims))


def _check_dims(value: ir.Value, tensor: TensorSpec) -> None:
    traced = [d if isinstance(d, int) else str(d) for d in value.shape or ()]
    sizes = [(a, b) for a, b in zip(traced, tensor.dims, strict=False) if isinstance(a, int) or isinstance(b, int)]
    if len(traced) != len(tensor.dims) or any(a != b for a, b in sizes):
        raise ExportError(
            tensor.name,
            f"dims {traced} in the trace",
            f"{list(tensor.dims)} as config.json says",
            "This architecture's sizes do not follow its config; it cannot be exported.",
        )


def _drop_metadata(model: ir.Model) -> None:
    """Remove what torch notes about the trace: stack traces with this machine's paths on every node."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    model.ir_version = IR_VERSION


def _check_attention(model: ir.Model, dims: ModelDims) -> None:
    count = sum(n.op_type == "CachedAttention" for n in model.graph)
    if count != dims.num_layers:
        raise ExportError(
            dims.model_type,
            f"{count} CachedAttention nodes",
            f"one for each of {dims.num_layers} layers",
            "Its attention cannot be replaced; this architecture cannot be exported.",
        )
