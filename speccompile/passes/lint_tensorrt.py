# SPDX-License-Identifier: Apache-2.0
"""Refuses what TensorRT's parser rejects late, ignores silently, or aborts on.

An unresolved plugin node aborts the process, `nonpad_kv_seqlen` is dropped with a warning, and an unsupported operator
is reported without saying what to do; here each is a PassError that names the node.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from speccompile.core.specs import GraphSpec
from speccompile.errors import PassError
from speccompile.ops.cached_attention import ATTENTION_OPS
from speccompile.ops.registry import OPS
from speccompile.passes.base import Pass
from speccompile.passes.edit import OPS_DOMAIN
from speccompile.passes.match import constant

# Operators that TensorRT 11 and TensorRT-RTX 1.7 do not support, and their equivalents.
REFUSED_OPS = {
    "CumProd": "Use CumSum of logarithms, or a comparison chain.",
    "Multinomial": "Draw with uniforms that are inputs: CumSum, then count the sums below the draw.",
    "Bernoulli": "Compare with uniforms that are inputs.",
    "Unique": "Sort with TopK and compare neighbours.",
    "BitwiseAnd": "Use And on booleans, or arithmetic on integers.",
    "BitwiseOr": "Use Or on booleans, or arithmetic on integers.",
    "BitwiseXor": "Use Xor on booleans, or arithmetic on integers.",
    "BitwiseNot": "Use Not on booleans, or arithmetic on integers.",
    "DynamicQuantizeLinear": "Quantise weights alone (quantize_qdq), or with static scales.",
    "MatMulInteger": "Use DequantizeLinear before MatMul (quantize_qdq).",
    "SkipLayerNormalization": "Use Add and LayerNormalization.",
    # The parser lists these as supported, but their plugin library is in no package.
    "GroupQueryAttention": "Use TensorScatter and Attention (lower_attention_tensorrt).",
    "MatMulNBits": "Use DequantizeLinear with block_size before MatMul (quantize_qdq).",
    "QMoE": "Use one MatMul an expert.",
    "LinearAttention": "Use speccompile::GatedDelta with its function body.",
    "CausalConvWithState": "Use speccompile::ConvRows with its function body.",
}
MAX_TOP_K = 3840
NONPAD_INPUT = 6  # of Attention: nonpad_kv_seqlen
_STANDARD = ("", "ai.onnx")


def _error(node: ir.Node, got: str, expected: str, todo: str) -> PassError:
    name = node.name or (node.outputs[0].name if node.outputs else "") or "without a name"
    return PassError(f"TensorRT lint: {node.op_type} node {name}", got, expected, todo)


def _check_op(node: ir.Node, plugins: Collection[str], functions: Collection[tuple[str, str]]) -> None:
    if node.op_type in REFUSED_OPS:
        raise _error(node, "an operator without an implementation", "what TensorRT takes", REFUSED_OPS[node.op_type])
    if node.domain in _STANDARD or node.op_type in plugins:
        return
    # A body is written for one cache; a node over several has a plugin or nothing.
    if (node.domain, node.op_type) in functions and "num_caches" not in node.attributes:
        return
    known = ", ".join(sorted(plugins)) or "none"
    got = f"{node.domain}::{node.op_type}, neither a plugin nor a function of the model"
    todo = "Register its plugin first, or attach its function body: TensorRT would abort the process."
    raise _error(node, got, f"one of the plugins ({known}) or a function body", todo)


def _check_attention(node: ir.Node) -> None:
    if len(node.inputs) > NONPAD_INPUT and node.inputs[NONPAD_INPUT] is not None:
        raise _error(node, "nonpad_kv_seqlen, which TensorRT ignores", "an additive mask", "Use AttentionMasks.")
    softcap = node.attributes["softcap"].as_float() if "softcap" in node.attributes else 0.0
    if softcap:
        raise _error(node, f"softcap {softcap:g}", "no softcap", "Write it out: lower_attention_tensorrt does.")
    causal = node.attributes["is_causal"].as_int() if "is_causal" in node.attributes else 0
    if causal and len(node.inputs) > 3 and node.inputs[3] is not None:
        raise _error(node, "a mask and is_causal", "one of them", "Put causality into the mask.")


def _check_topk(node: ir.Node) -> None:
    count = constant(node.inputs[1])
    if count is None:
        raise _error(node, "a K that is computed", "a constant K", "Give K as a constant.")
    if int(count.reshape(-1)[0]) > MAX_TOP_K:
        got = f"K = {int(count.reshape(-1)[0])}"
        raise _error(node, got, f"K of at most {MAX_TOP_K}", "Search the threshold by bisection instead of sorting.")


def _check_scatter(node: ir.Node) -> None:
    cache = node.inputs[0]
    if cache is None or not cache.is_graph_input():
        maker = None if cache is None else cache.producer()
        got = f"a cache made by {'nothing' if maker is None else maker.op_type}"
        todo = "Update each cache once, straight from its input; join several updates before."
        raise _error(node, got, "a cache that is a graph input", todo)
    if not node.outputs[0].is_graph_output():
        raise _error(node, "an update that stays inside", "an update that is a graph output", "Make it an output.")
    if sum(user.op_type == "TensorScatter" for user, _ in cache.uses()) > 1:
        raise _error(node, f"a second update of {cache.name}", "one update a cache", "Join the updates.")


def _check_types(model: ir.Model) -> None:
    for node in model.graph.all_nodes():
        for value in (*node.inputs, *node.outputs):
            if value is not None and value.dtype == ir.DataType.DOUBLE:
                raise _error(node, f"{value.name} in float64", "float32 or less", "Cast it to float32.")


_CHECKS = {"Attention": _check_attention, "TopK": _check_topk, "TensorScatter": _check_scatter}


def lint_tensorrt(model: ir.Model, plugins: Collection[str] = (), bodies: Collection[str] = ()) -> int:
    """Checks the main graph and the functions that it calls; changes nothing and returns 0.

    Args:
        plugins: op types whose plugins will be registered when the parser runs.
        bodies: our op types whose function bodies are attached later.
    """
    functions = {(f.domain, f.name) for f in model.functions.values()} | {(OPS_DOMAIN, name) for name in bodies}
    for node in model.graph.all_nodes():
        _check_op(node, plugins, functions)
        if node.domain in _STANDARD and node.op_type in _CHECKS:
            _CHECKS[node.op_type](node)
    for function in model.functions.values():
        for node in function.all_nodes():
            _check_op(node, plugins, functions)
            if node.op_type == "Attention":
                _check_attention(node)
    _check_types(model)
    return 0


def lint_pass(plugins: Collection[str]) -> Pass:
    """Returns the lint as the last entry of a table; our ops may get their function bodies after it."""
    bodies = set(OPS) - set(ATTENTION_OPS)
    return Pass("lint_tensorrt", lambda model: lint_tensorrt(model, plugins, bodies))


def check_io(model: ir.Model, spec: GraphSpec) -> int:
    """Checks that inputs and outputs are those of `spec`, and that every input is read; returns 0.

    Raises:
        PassError: a name, a dim or a dtype differs, or an input is not read, which TensorRT keeps and steps must bind.
    """
    for held, wanted in ((model.graph.inputs, spec.inputs), (model.graph.outputs, spec.outputs)):
        got = [(v.name, tuple(d if isinstance(d, int) else str(d) for d in v.shape or ()), v.dtype) for v in held]
        for have, tensor in zip(got, wanted, strict=False):
            kind = ir.DataType[tensor.dtype.upper() if tensor.dtype != "float32" else "FLOAT"]
            if have != (tensor.name, tensor.dims, kind):
                raise PassError(f"{spec.name}: {tensor.name}", f"{have}", f"{(tensor.name, tensor.dims, kind)}", _FAULT)
        if len(got) != len(wanted):
            raise PassError(spec.name, f"{len(got)} tensors", f"{[t.name for t in wanted]}", _FAULT)
    for value in model.graph.inputs:
        if not value.uses() and not value.is_graph_output():
            todo = "Take it out of the graph's spec."
            raise PassError(f"{spec.name}: {value.name}", "an input that nothing reads", "inputs that are read", todo)
    return 0


_FAULT = "This is a fault of the table: report it with the model's config."
