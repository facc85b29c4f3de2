# SPDX-License-Identifier: Apache-2.0
"""Common subexpressions, dead nodes and unused names: the passes of onnx-ir itself."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from speccompile.passes.base import as_pass


@as_pass()
def share_common_subexpressions(model: ir.Model) -> int:
    """Merge nodes that compute the same value; returns how many were removed."""
    before = model.graph.num_nodes()
    common.CommonSubexpressionEliminationPass()(model)
    return before - model.graph.num_nodes()


@as_pass()
def remove_dead(model: ir.Model) -> int:
    """Remove identities, unused nodes and unused initializers; returns how many were removed."""
    before = model.graph.num_nodes() + len(model.graph.initializers)
    common.IdentityEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    return before - model.graph.num_nodes() - len(model.graph.initializers)
