# SPDX-License-Identifier: Apache-2.0
"""All ops of the domain, and how models and evaluators get them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from speccompile.ops.cached_attention import CACHED_ATTENTION
from speccompile.ops.kv_rollback import KV_ROLLBACK
from speccompile.ops.laws import DRAW, DRAW_IN_BLOCKS, FIRST_MAX, FIRST_MAX_IN_BLOCKS
from speccompile.ops.op import DOMAIN, VERSION, Op
from speccompile.ops.sample_token import SAMPLE_TOKEN
from speccompile.ops.spec_verify import SPEC_VERIFY
from speccompile.ops.walk import WALK, WALK_LAWS
from speccompile.ops.warp import WARP

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnx import FunctionProto
    from onnx.reference.op_run import OpRun

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        SPEC_VERIFY,
        SAMPLE_TOKEN,
        KV_ROLLBACK,
        CACHED_ATTENTION,
        WALK,
        WALK_LAWS,
        WARP,
        DRAW,
        DRAW_IN_BLOCKS,
        FIRST_MAX,
        FIRST_MAX_IN_BLOCKS,
    )
}


def with_uses(names: Iterable[str]) -> list[str]:
    """The ops of these names and all that their bodies call, callees first."""
    ordered: list[str] = []

    def visit(name: str) -> None:
        for callee in OPS[name].uses:
            visit(callee)
        if name not in ordered:
            ordered.append(name)

    for name in names:
        visit(name)
    return ordered


def functions(names: Iterable[str] | None = None, vocab: int | None = None) -> list[FunctionProto]:
    """FunctionProtos of these ops (None: of all) and of all that they call, callees first.

    Args:
        names: op types.
        vocab: size of the vocabulary where it is known; the bodies are then made for it.
    """
    return [OPS[name].function(vocab) for name in with_uses(OPS if names is None else names)]


def _vocab_of(nodes: Iterable[ir.Node]) -> int | None:
    """The one vocabulary that these nodes reduce; None where it is not static or not the same in all."""
    sizes = set()
    for node in nodes:
        for tensor, value in zip(OPS[node.op_type].inputs, node.inputs, strict=False):
            if tensor.dims[-1] == "vocab" and value is not None:
                sizes.add(value.shape[-1] if value.shape is not None else None)
    (size,) = sizes if len(sizes) == 1 else (None,)
    return size if isinstance(size, int) else None


def attach_functions(model: ir.Model) -> int:
    """Add the bodies of the ops that `model` uses as model-local functions.

    Attributes left out are written with their defaults; a body that is attached already is kept.

    Returns:
        The number of functions added.
    """
    import onnx_ir as ir

    nodes = [n for n in model.graph.all_nodes() if n.domain == DOMAIN and n.op_type in OPS]
    for node in nodes:
        # onnx's reference evaluator does not apply the defaults of function attributes.
        for name, default in OPS[node.op_type].attributes.items():
            if name not in node.attributes:
                node.attributes[name] = ir.convenience.convert_attribute(name, default)
    used = {n.op_type for n in nodes}
    num_added = 0
    for proto in functions(sorted(used), _vocab_of(nodes)):
        function = ir.from_proto(proto)
        if function.identifier() not in model.functions:
            model.functions[function.identifier()] = function
            num_added += 1
    if used:
        model.opset_imports[DOMAIN] = VERSION
    return num_added


def reference_ops() -> list[type[OpRun]]:
    """The numpy twins, for `onnx.reference.ReferenceEvaluator(model, new_ops=...)`."""
    from onnx.reference.op_run import OpRun

    def run(self: Any, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        op = OPS[type(self).__name__]
        known = {n: attributes.get(n, default) for n, default in op.attributes.items()}
        given = {n: default if known[n] is None else known[n] for n, default in op.attributes.items()}
        return op.twin(*inputs, **given)

    return [type(name, (OpRun,), {"op_domain": DOMAIN, "_run": run}) for name in OPS]
