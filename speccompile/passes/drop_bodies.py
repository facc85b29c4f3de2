# SPDX-License-Identifier: Apache-2.0
"""Remove the function bodies of ops that a plugin shall run: a body would take precedence over the plugin."""

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
    """Returns the pass for these op types; it runs after bodies were attached."""
    return Pass("drop_bodies", lambda model: drop_bodies(model, ops))
