# SPDX-License-Identifier: Apache-2.0
"""Function bodies taken away from ops that a plugin shall run and that a body would win over."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from speccompile.passes.base import Pass


def drop_bodies(model: ir.Model, ops: Collection[str]) -> int:
    """Remove the model-local functions of these op types; returns their number."""
    found = [key for key, function in model.functions.items() if function.name in ops]
    for key in found:
        del model.functions[key]
    return len(found)


def drop_bodies_pass(ops: Collection[str]) -> Pass:
    """The pass for these op types; it runs behind the attaching of bodies."""
    return Pass("drop_bodies", lambda model: drop_bodies(model, ops))
