# SPDX-License-Identifier: Apache-2.0
"""torch.export and its ONNX translation: a module with our ops -> a graph with the tensors of a spec."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from onnx import defs
from onnx_ir.passes import common
from onnxscript import optimizer, values
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules import common as rules
from torch import fx, nn

from speccompile.core.specs import SHARED_ROWS, GraphSpec, TensorSpec
from speccompile.errors import ExportError
from speccompile.export import attention, candidates, recurrent
from speccompile.export.decompose import decompose_if_needed, promote_without_running, without_grad
from speccompile.export.weights import name_weights, names_by_address, share_weights
from speccompile.ops.cached_attention import CACHED_ATTENTION, SHARED_ATTENTION, SINK_ATTENTION
from speccompile.ops.candidates import NODE_PROBS_OP, TOP_TOKENS
from speccompile.ops.conv_rows import CONV_ROWS
from speccompile.ops.cross_attention import CROSS_ATTENTION
from speccompile.ops.gated_delta import GATED_DELTA
from speccompile.ops.op import DOMAIN, OPSET, VERSION, Op
from speccompile.ops.sample_token import SAMPLE_TOKEN
from speccompile.passes.base import Pass, run_pipeline

IR_VERSION = 12  # of ONNX 1.19, the first with opset 24
OUR_TORCH_OPS = (attention, candidates, recurrent)  # modules whose import registers the torch ops translated below


# Neither 0 nor 1, which torch would treat as constants.
_EXAMPLE_SIZES = {"batch": 2, "nodes": 3, "scored": 2, "max_seq": 16, "states": 4, SHARED_ROWS: 12}


def trace_draft(
    module: nn.Module,
    spec: GraphSpec,
    progress: Callable[[str], None],
    cleanup: Sequence[Pass],
    groups: Sequence[int] = (),
    outputs: GraphSpec | None = None,
    finish: Callable[[ir.Model], None] = lambda graph: None,
) -> ir.Model:
    """Traces a drafter and cleans the trace; the neutral graph's weights refer to torch's memory.

    Args:
        module: takes the inputs of `spec` in order, the last ones as lists of so many as `groups` says.
        outputs: with what the module returns, where it is not what `spec` says; `finish` makes one of the other.
    """

    def grouped(each: list[Any]) -> tuple[Any, ...]:
        lists: list[Any] = []
        for num in reversed(groups):
            each, last = each[: len(each) - num], each[len(each) - num :]
            lists.insert(0, last)
        return (*each, *lists)

    progress("trace")
    dims = {name: torch.export.Dim(name, min=1) for name in _EXAMPLE_SIZES}
    example = [_example(tensor) for tensor in spec.inputs]
    dynamic = [{i: dims[d] for i, d in enumerate(t.dims) if isinstance(d, str)} for t in spec.inputs]
    names = names_by_address(module)
    graph = trace_module(module.eval(), grouped(example), grouped(dynamic), outputs or spec, spec.name)
    share_weights(graph)
    name_weights(graph, names)
    finish(graph)
    run_pipeline(graph, tuple(cleanup), progress)
    return graph


def _example(tensor: TensorSpec) -> torch.Tensor:
    shape = [d if isinstance(d, int) else _EXAMPLE_SIZES[d] for d in tensor.dims]
    made = torch.ones if tensor.dtype == "bool" else torch.zeros
    return made(shape, dtype=getattr(torch, tensor.dtype))


def trace_module(
    module: nn.Module, example: tuple[Any, ...], dims: Sequence[Any], spec: GraphSpec, where: str
) -> ir.Model:
    """Traces `module` and gives its inputs and outputs the names and dims of `spec`.

    Args:
        example: its arguments; no dynamic size may be 0 or 1, which torch would treat as constants.
        dims: the dynamic dims of each argument, as `torch.export` takes them.

    Returns:
        The graph, opset 24 and the domain speccompile; its weights refer to torch's memory.

    Raises:
        ExportError: torch cannot trace the module, or the trace has other dims than `spec`.
    """
    with _quiet(), without_grad(), decompose_if_needed(), promote_without_running():
        try:
            program = torch.onnx.export(
                module,
                example,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=dims,
                custom_translation_table=_translations(),
                verbose=False,
                optimize=False,
            )
        except torch.onnx.OnnxExporterError as fault:
            raise ExportError(
                where,
                f"a failed trace: {_first_cause(fault)}",
                "a forward pass that torch.export and its ONNX translation can follow",
                "This architecture cannot be exported.",
            ) from fault
    assert program is not None
    model = program.model
    simplify(model)
    _declare_io(model, spec)
    _drop_metadata(model)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's exporter, and its stack trace for each node, a twentieth of its time (see `_drop_metadata`)."""
    logger = logging.getLogger("torch.onnx")
    level, has_no_traces = logger.level, fx.config.do_not_emit_stack_traces
    logger.setLevel(logging.ERROR)
    fx.config.do_not_emit_stack_traces = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        fx.config.do_not_emit_stack_traces = has_no_traces


def _first_cause(fault: BaseException) -> str:
    while fault.__cause__ is not None:
        fault = fault.__cause__
    lines = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {lines[0] if lines else 'no message'}"


def _translations() -> dict[Any, Callable[..., Any]]:
    _declare_schema(CACHED_ATTENTION)
    for op in (SINK_ATTENTION, SHARED_ATTENTION, CROSS_ATTENTION, GATED_DELTA, CONV_ROWS):
        _declare_schema(op)
    for op in (SAMPLE_TOKEN, TOP_TOKENS, NODE_PROBS_OP):
        _declare_schema(op)
    ours, standard = values.Opset(DOMAIN, VERSION), values.Opset("", OPSET)

    def cached_attention(q, k, v, k_cache, v_cache, lengths, tree_mask, scale, softcap, window, sinks=None):  # type: ignore[no-untyped-def]
        inputs = (q, k, v, k_cache, v_cache, lengths, tree_mask)
        if sinks is not None:
            return ours.SinkAttention(*inputs, sinks, scale=scale, window=window)
        return ours.CachedAttention(*inputs, scale=scale, softcap=softcap, window=window)

    def shared_attention(q, k_cache, v_cache, lengths, tree_mask, scale, softcap, window):  # type: ignore[no-untyped-def]
        inputs = (q, k_cache, v_cache, lengths, tree_mask)
        return ours.SharedAttention(*inputs, scale=scale, softcap=softcap, window=window)

    def cross_attention(q, k_cache, v_cache, limits, scale, window=0):  # type: ignore[no-untyped-def]
        return ours.CrossAttention(q, k_cache, v_cache, limits, scale=scale, window=window)

    def gather_nodes(x, nodes):  # type: ignore[no-untyped-def]
        indices = standard.Unsqueeze(nodes, standard.Constant(value_ints=[2]))
        return standard.GatherND(x, indices, batch_dims=1)

    def gated_delta(*arguments):  # type: ignore[no-untyped-def]
        inputs, attributes = arguments[:-4], zip(GATED_DELTA.attributes, arguments[-4:], strict=True)
        return ours.GatedDelta(*inputs, **dict(attributes))

    def conv_rows(*arguments):  # type: ignore[no-untyped-def]
        return ours.ConvRows(*arguments[:-1], activation=arguments[-1])

    def sample(logits, uniforms, temperature, top_k, top_p):  # type: ignore[no-untyped-def]
        return ours.SampleToken(logits, uniforms, temperature, top_k, top_p)

    def top_tokens(logits, num_candidates):  # type: ignore[no-untyped-def]
        return ours.TopTokens(logits, num_candidates=num_candidates)

    def node_probs(logits, temperature, top_k, top_p):  # type: ignore[no-untyped-def]
        return ours.NodeProbs(logits, temperature, top_k, top_p)

    ops = torch.ops.speccompile
    return {
        ops.cached_attention.default: cached_attention,
        ops.shared_attention.default: shared_attention,
        ops.cross_attention.default: cross_attention,
        ops.gather_nodes.default: gather_nodes,
        ops.gated_delta.default: gated_delta,
        ops.conv_rows.default: conv_rows,
        ops.sample_token.default: sample,
        ops.top_tokens.default: top_tokens,
        ops.node_probs.default: node_probs,
    }


def _declare_schema(op: Op) -> None:
    """Register one of our ops with onnx, which torch's exporter requires; once per process."""
    if defs.has(op.name, VERSION, DOMAIN):
        return
    kinds = {float: defs.OpSchema.AttrType.FLOAT, int: defs.OpSchema.AttrType.INT}

    # TensorRT's graphs have the same ops with inputs in half precision, each independently.
    reals = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    constraints = [(f"T_{t.name}", reals, "") for t in op.inputs if t.dtype == "float32"]

    def parameters(tensors: tuple[TensorSpec, ...], real: str) -> list[Any]:
        types = {"float32": real, "int64": "tensor(int64)", "bool": "tensor(bool)"}
        return [defs.OpSchema.FormalParameter(t.name, types[t.dtype].format(t.name)) for t in tensors]

    attributes = [defs.OpSchema.Attribute(n, kinds[type(v)], "", required=False) for n, v in op.attributes.items()]
    sides = {"inputs": parameters(op.inputs, "T_{}"), "outputs": parameters(op.outputs, "tensor(float)")}
    defs.register_schema(
        defs.OpSchema(op.name, DOMAIN, VERSION, **sides, type_constraints=constraints, attributes=attributes)
    )


def _declare_io(model: ir.Model, spec: GraphSpec) -> None:
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
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    model.ir_version = IR_VERSION


# Each has one node as its output, so that a node is visited once.
RULES = (
    *(*rules.mul_by_1_rule.commute(), *rules.add_0_rule.commute(), rules.sub_0_rule, rules.div_by_1_rule),
    *(rules.two_reshapes_matmul_reshape_rule, rules.one_reshape_matmul_reshape_rule),
    *(rules.cast_constant_of_shape_rule, rules.cast_constant_of_shape_without_value_rule),
    *(rules.collapse_slice_rule, rules.collapse_slice2_rule, rules.materialize_reshape_shape_rule),
    *(rules.min_min_rule, rules.max_max_rule, rules.min_max_rule, rules.max_min_rule),
    *(rules.cast_cast_rule, rules.no_op_cast_rule, rules.no_op_expand_rule),
    *(rules.flatten_to_reshape_rule, rules.reshape_reshape_rule, rules.squeeze_reshape_1d_rule),
    *(rules.no_op_transpose_rule, rules.transpose_transpose_rule, rules.unsqueeze_unsqueeze_rule),
    *(rules.no_op_dynamic_scatter_nd_rule, rules.no_op_static_scatter_nd_rule),
    *(rules.remove_optional_bias_from_conv_rule, rules.remove_optional_bias_from_gemm_rule),
)
_ROUNDS = 2  # what the first removes shows constants to the second


def simplify(model: ir.Model) -> None:
    """Simplifies a model in place: functions inlined, constants folded and shared, no-ops and unused nodes removed.

    onnxscript's optimizer walks the whole graph at every pair of slices: 18 of 44 s of the export of 30 layers.
    """
    common.InlinePass()(model)
    for _ in range(_ROUNDS):
        optimizer.fold_constants(model, onnx_shape_inference=True)
        RewritePass(RULES)(model)
        common.RemoveUnusedNodesPass()(model)
    for clean in (
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    ):
        clean(model)
    _free_rules()


def _free_rules() -> None:
    """Gives the rules another graph: each refers to the last one, with its weights, for the life of the process."""
    x, y = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2])) for name in "xy")
    nodes = [ir.Node("", "Neg", [x], outputs=[y])]
    RewritePass(RULES)(ir.Model(ir.Graph([x], [y], nodes=nodes, opset_imports={"": OPSET}), ir_version=12))
