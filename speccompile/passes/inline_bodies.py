# SPDX-License-Identifier: Apache-2.0
"""Inline function bodies into the main graph, with all types and shapes that can be inferred."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from speccompile.passes.base import Property, as_pass


def _find_call(model: ir.Model) -> str | None:
    called = {n.op_identifier() for n in model.graph.all_nodes()} & set(model.functions)
    return f"calls of {sorted(name for _, name, _ in called)} are left" if called else None


BODIES_INLINED = Property("no function is called", _find_call)


@as_pass(ensures=(BODIES_INLINED,))
def inline_bodies(model: ir.Model) -> int:
    """Inline every call; returns how many functions were removed."""
    count = len(model.functions)
    common.InlinePass()(model)
    common.ShapeInferencePass()(model)
    return count - len(model.functions)
