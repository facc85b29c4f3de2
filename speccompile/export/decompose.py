# SPDX-License-Identifier: Apache-2.0
"""Spares torch's ONNX exporter what our programs do not need: work on a program that leaves it as it is.

The exporter decomposes every program, which traces it twice more: half the time of an export. Nearly all our operators
have an ONNX translation; conversions and operators in place are rewritten here. A program with anything else is
decomposed by torch. It also runs every operator again to find arguments that need a conversion (a fifth of the
remaining time), and splits a program where gradients are off from the start.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from onnxscript.function_libs.torch_lib import registration
from torch import fx
from torch.onnx._internal.fx.passes import type_promotion

_ATEN = torch.ops.aten
# Conversions, which are translated in their decomposed form alone.
_CONVERSIONS = (_ATEN.to.dtype, _ATEN.to.device, _ATEN.to.dtype_layout, _ATEN.to.other, _ATEN.type_as.default)
# Conditions, which the exporter leaves out.
_ASSERTIONS = (
    *(_ATEN._assert_scalar.default, _ATEN._assert_tensor_metadata.default, _ATEN._assert_async.msg),
    *(_ATEN._assert_async.default, _ATEN.sym_constrain_range_for_size.default),
)
# Python's operators on tensors, which have another name than the operators that compute them.
_RENAMED = {
    _ATEN.__and__.Tensor: _ATEN.bitwise_and.Tensor,
    _ATEN.__or__.Tensor: _ATEN.bitwise_or.Tensor,
    _ATEN.__xor__.Tensor: _ATEN.bitwise_xor.Tensor,
}
# Composite operators whose result is never one of their arguments, although they decompose.
_FRESH = (_ATEN.linear.default, _ATEN.matmul.default)


@contextmanager
def decompose_if_needed() -> Iterator[None]:
    """Within the block `run_decompositions` of a program returns it as it is where `is_simplified` allows."""
    kind = torch.export.ExportedProgram
    decompose = kind.run_decompositions

    def run(program: Any, table: Any = None, **options: Any) -> Any:
        if table is not None and is_simplified(program, table):
            return program
        return decompose(program, table, **options)

    kind.run_decompositions = run
    try:
        yield
    finally:
        kind.run_decompositions = decompose


@contextmanager
def promote_without_running() -> Iterator[None]:
    """Within the block the exporter's type promotion takes results from the trace, and runs what it changes alone."""
    kind = type_promotion._TypePromotionInterpreter
    run_every_node = kind.run_node

    def run_node(self: Any, node: fx.Node) -> Any:
        with self._set_current_node(node):
            rule = type_promotion.get_type_promotion_rule(node, self.type_promotion_table)
            if rule is not None:
                self._maybe_promote_node(node, rule)
        known = node.op == "call_function" and "val" in node.meta
        return node.meta["val"] if known else fx.Interpreter.run_node(self, node)

    kind.run_node = run_node
    try:
        yield
    finally:
        kind.run_node = run_every_node


@contextmanager
def without_grad() -> Iterator[None]:
    """Switches gradients off; `torch.no_grad` blocks inside leave no trace of themselves in a program."""
    kind = torch.no_grad
    enter, leave = kind.__enter__, kind.__exit__

    def enter_if_on(self: Any) -> None:
        self.prev = torch.is_grad_enabled()
        if self.prev:
            enter(self)

    def leave_if_on(self: Any, *error: Any) -> None:
        if self.prev:
            leave(self, *error)

    with torch.no_grad():
        kind.__enter__, kind.__exit__ = enter_if_on, leave_if_on
        try:
            yield
        finally:
            kind.__enter__, kind.__exit__ = enter, leave


def is_simplified(program: Any, table: Container[Any]) -> bool:
    """Rewrites conversions and operators of an exported program in place; returns whether all can be translated."""
    if any(module is not program.graph_module for module in program.graph_module.modules()):
        return False  # graphs of branches, or modules that are called
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    for node in order:
        node.target = called = _RENAMED.get(node.target, node.target)
        if node.op != "call_function" or not isinstance(called, torch._ops.OperatorBase):
            continue  # Python's own operators, on sizes
        if called in _ASSERTIONS:
            continue
        if called in _CONVERSIONS:
            if True in (*node.args[1:], *node.kwargs.values()):  # a copy is asked for
                return False
            _simplify_conversion(node)
        elif not isinstance(called, torch._ops.OpOverload):
            return False
        elif called._schema.is_mutable:
            twin = _functional_twin(node, order)
            if twin is None or not _is_translated(twin, table):
                return False
            later = [user for user in node.args[0].users if order[user] > order[node]]
            for user in later:
                user.replace_input_with(node.args[0], node)
            node.target = twin
        elif not _is_translated(called, table):
            return False
        elif called is _ATEN.chunk.default and len(node.args) == 3:  # torch's own decomposition counts axes from 0
            node.args = (*node.args[:2], node.args[2] % node.args[0].meta["val"].ndim)
    return True


def _simplify_conversion(node: fx.Node) -> None:
    x, value = node.args[0], node.meta["val"]
    if x.meta["val"].dtype != value.dtype:
        node.target, node.args, node.kwargs = _ATEN._to_copy.default, (x,), {"dtype": value.dtype}
    elif any(user.op == "output" for user in node.users):  # outputs are found by name
        node.target, node.args, node.kwargs = _ATEN.alias.default, (x,), {}
    else:
        node.replace_all_uses_with(x)
        node.graph.erase_node(node)


def _functional_twin(node: fx.Node, order: dict[fx.Node, int]) -> Any:
    """Returns the operator with the same result that leaves its arguments alone; None where that changes the program.

    Later users of the changed tensor can read the result; views of it, callers and users by name cannot.
    """
    changed, schema = node.args[0], node.target._schema
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    if written != [0] or not isinstance(changed, fx.Node):
        return None
    read = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, fx.Node)]
    dtypes = {a.meta["val"].dtype for a in read if isinstance(a.meta.get("val"), torch.Tensor)}
    users = [user for user in changed.users if user is not node]
    later = [user for user in users if order[user] > order[node]]
    has_views = not all(_is_fresh(user) for user in users if user not in later)
    if len(dtypes) != 1 or not _is_own(changed) or has_views or any(user.op == "output" for user in later):
        return None
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    return getattr(packet, node.target._overloadname, None) if name.endswith("_") else None


def _is_fresh(node: fx.Node) -> bool:
    called = node.target
    if not isinstance(called, torch._ops.OpOverload) or any(r.alias_info for r in called._schema.returns):
        return False
    return called in _FRESH or not _is_composite(called)  # some composite ones return an argument as it is


def _is_composite(called: Any) -> bool:
    return bool(called.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _is_translated(called: Any, table: Container[Any]) -> bool:
    return called.namespace == "speccompile" or (called not in table and called.name() in _translated())


@cache
def _translated() -> frozenset[str]:
    import_module("onnxscript.function_libs.torch_lib.ops")
    return frozenset(name for name, _ in registration.default_registry.items())


def _is_own(node: fx.Node) -> bool:
    if _is_fresh(node):
        return True
    if node.op != "call_function":
        return False
    sources = [a for a in node.args if isinstance(a, fx.Node)]
    if node.target is operator.getitem:  # one of several results
        return _is_fresh(sources[0])
    return bool(sources) and all(len(source.users) == 1 and _is_own(source) for source in sources)
