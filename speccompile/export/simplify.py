# SPDX-License-Identifier: Apache-2.0
"""Folds constants and removes no-ops from a traced graph, in time that grows with its nodes.

torch's exporter would call onnxscript's optimizer, whose rule for two slices walks the whole graph at every slice: that
is 18 of 44 s of the export of a model of 30 layers.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules import common as rules

from speccompile.ops.op import OPSET

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
    """Simplifies a model in place: functions inlined, constants folded and shared, no-ops and unused nodes removed."""
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
