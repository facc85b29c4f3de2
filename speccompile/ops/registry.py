# SPDX-License-Identifier: Apache-2.0
"""All ops of the domain, and how they are attached to models and evaluators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from speccompile.errors import PassError
from speccompile.ops.cached_attention import CACHED_ATTENTION, LATENT_ATTENTION, SHARED_ATTENTION, SINK_ATTENTION
from speccompile.ops.candidates import NODE_PROBS_OP, TOP_TOKENS
from speccompile.ops.conv_rows import CONV_ROWS
from speccompile.ops.cross_attention import CROSS_ATTENTION, ROTARY_CROSS_ATTENTION
from speccompile.ops.dists import DRAW, DRAW_IN_BLOCKS, FIRST_MAX, FIRST_MAX_IN_BLOCKS, RACE
from speccompile.ops.expert_linear import EXPERT_LINEARS
from speccompile.ops.finite_token import FINITE_TOKEN
from speccompile.ops.gated_delta import GATED_DELTA
from speccompile.ops.int8_caches import INT8_ATTENTION, QUANTIZE_ROWS
from speccompile.ops.kv_rollback import KV_ROLLBACK
from speccompile.ops.low_rank import ADD_NORM, GATED_LOW_RANK, LOW_RANK
from speccompile.ops.op import DOMAIN, VERSION, Op
from speccompile.ops.packed_linear import PACKED_LINEARS
from speccompile.ops.packed_rows import PACKED_ROWS
from speccompile.ops.qkv_attention import QKV_ATTENTION
from speccompile.ops.sample_token import SAMPLE_TOKEN
from speccompile.ops.spec_verify import SPEC_VERIFY
from speccompile.ops.tensorrt.bodies import drafts_from_width, tensorrt_ops
from speccompile.ops.tensorrt.recurrence import gated_delta_op, most_rows
from speccompile.ops.walk import WALK, WALK_PROBS
from speccompile.ops.warp import WARP

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnx import FunctionProto
    from onnx.reference.op_run import OpRun

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        SPEC_VERIFY,
        FINITE_TOKEN,
        SAMPLE_TOKEN,
        TOP_TOKENS,
        NODE_PROBS_OP,
        KV_ROLLBACK,
        CACHED_ATTENTION,
        SINK_ATTENTION,
        LATENT_ATTENTION,
        SHARED_ATTENTION,
        CROSS_ATTENTION,
        ROTARY_CROSS_ATTENTION,
        *QKV_ATTENTION.values(),
        QUANTIZE_ROWS,
        *INT8_ATTENTION.values(),
        GATED_DELTA,
        CONV_ROWS,
        LOW_RANK,
        GATED_LOW_RANK,
        ADD_NORM,
        WALK,
        WALK_PROBS,
        WARP,
        DRAW,
        DRAW_IN_BLOCKS,
        FIRST_MAX,
        FIRST_MAX_IN_BLOCKS,
        RACE,
        *PACKED_LINEARS,
        *PACKED_ROWS,
        *EXPERT_LINEARS,
    )
}


Dialect = Literal["onnx", "tensorrt"]


def with_uses(names: Iterable[str], ops: Mapping[str, Op] = OPS) -> list[str]:
    """Returns the ops of these names and all that their bodies call, callees first."""
    ordered: list[str] = []

    def visit(name: str) -> None:
        for callee in ops[name].uses:
            visit(callee)
        if name not in ordered:
            ordered.append(name)

    for name in names:
        visit(name)
    return ordered


def functions(
    names: Iterable[str] | None = None, vocab: int | None = None, ops: Mapping[str, Op] = OPS
) -> list[FunctionProto]:
    """Returns the FunctionProtos of these ops (None: of all) and of their callees, which come first.

    Args:
        vocab: size of the vocabulary where it is known; the bodies are then made for it.
    """
    return [ops[name].function(vocab) for name in with_uses(ops if names is None else names, ops)]


def _vocab_of(nodes: Iterable[ir.Node]) -> int | None:
    sizes = set()
    for node in nodes:
        for tensor, value in zip(OPS[node.op_type].inputs, node.inputs, strict=False):
            if tensor.dims[-1] == "vocab" and value is not None:
                sizes.add(value.shape[-1] if value.shape is not None else None)
    (size,) = sizes if len(sizes) == 1 else (None,)
    return size if isinstance(size, int) else None


_PENDING = [tensor.name for tensor in GATED_DELTA.inputs].index("pending")


def _ops_for_tensorrt(nodes: Iterable[ir.Node], vocab: int | None, max_nodes: int) -> Mapping[str, Op]:
    verifying = [n for n in nodes if n.op_type == SPEC_VERIFY.name]
    reducing = [n.op_type for n in nodes if any(t.dims[-1] == "vocab" for t in OPS[n.op_type].inputs)]
    if reducing and vocab is None:
        todo = "Give the logits a static last dim before the bodies are attached."
        raise PassError(f"node {reducing[0]}", "a vocabulary of unknown size", "a static one", todo)
    if any(len(n.inputs) > 8 and n.inputs[8] is not None for n in verifying):
        todo = "Spread the draft distributions over the target's vocabulary first: this body supports no other."
        raise PassError(f"node {SPEC_VERIFY.name}", "9 inputs", "8 inputs where there is no plugin", todo)
    dists = [n.inputs[3] for n in verifying]
    widths = {dist.shape[-1] if dist is not None and dist.shape is not None else None for dist in dists}
    width = next(iter(widths)) if len(widths) == 1 else None
    drafts = drafts_from_width(width if isinstance(width, int) else None, vocab)
    return {**OPS, **tensorrt_ops(drafts, max_nodes), GATED_DELTA.name: _recurrence(nodes, max_nodes)}


def _recurrence(nodes: Iterable[ir.Node], max_nodes: int) -> Op:
    ours = [n for n in nodes if n.op_type == GATED_DELTA.name]
    pending = [n.inputs[_PENDING] for n in ours]
    sizes = [p.shape[1] for p in pending if p is not None and p.shape is not None and isinstance(p.shape[1], int)]
    has_rule = not ours or any(n.attributes["delta"].as_int() for n in ours)
    return gated_delta_op(most_rows(max([max_nodes, *sizes]), max_nodes), has_rule)


def attach_functions(model: ir.Model, dialect: Dialect = "onnx", max_nodes: int = 17) -> int:
    """Adds the bodies of the ops that `model` uses, and default attributes; returns how many functions were added.

    Args:
        dialect: `onnx`: bodies for ONNX Runtime and the reference evaluator; `tensorrt`: without branches and loops.
        max_nodes: for `tensorrt`: most nodes of a scored tree, the root included; further nodes are never accepted.

    Raises:
        PassError: `tensorrt` only: the vocabulary is not static, or a draft vocabulary is left.
    """
    import onnx_ir as ir

    ours = [n for n in model.graph.all_nodes() if n.domain == DOMAIN and n.op_type in OPS]
    # A KVRollback over several caches is a plugin's: the body is written for one.
    nodes = [n for n in ours if "num_caches" not in n.attributes]
    for node in nodes:
        # onnx's reference evaluator does not apply the defaults of function attributes.
        for name, default in OPS[node.op_type].attributes.items():
            if name not in node.attributes:
                node.attributes[name] = ir.convenience.convert_attribute(name, default)
    used = {n.op_type for n in nodes}
    num_added = 0
    vocab = _vocab_of(nodes)
    ops = _ops_for_tensorrt(nodes, vocab, max_nodes) if dialect == "tensorrt" else OPS
    for proto in functions(sorted(used), vocab, ops):
        function = ir.from_proto(proto)
        if function.identifier() not in model.functions:
            model.functions[function.identifier()] = function
            num_added += 1
    if used:
        model.opset_imports[DOMAIN] = VERSION
    return num_added


def reference_ops() -> list[type[OpRun]]:
    """Returns the numpy twins, for `onnx.reference.ReferenceEvaluator(model, new_ops=...)`."""
    from onnx.reference.op_run import OpRun

    def run(self: Any, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        op = OPS[type(self).__name__]
        known = {n: attributes.get(n, default) for n, default in op.attributes.items()}
        given = {n: default if known[n] is None else known[n] for n, default in op.attributes.items()}
        return op.twin(*inputs, **given)

    return [type(name, (OpRun,), {"op_domain": DOMAIN, "_run": run}) for name in OPS]
