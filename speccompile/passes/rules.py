# SPDX-License-Identifier: Apache-2.0
"""Formulas as patterns of onnxscript's rewriter, which are matched in every order of commutative operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import pattern

# One of several formulas of a value, distinguished by their last operator.
either = pattern.OrValue


class Rule:
    """A formula that nodes of a graph may compute. The rewriter does not match where an inner value has other uses.

    Args:
        formula: given the rewriter's `op` and a variable for each further argument, the pattern of the result, whose
            last operator is `root`. Numbers in it match constants of that value.
        holds: given the matched variables and named outputs, whether the match is valid.
    """

    def __init__(self, formula: Callable[..., Any], holds: Callable[..., bool], root: str) -> None:
        self.holds, self.root = holds, root
        self._orders = pattern.RewriteRule(formula, formula).commute()

    def match(self, model: ir.Model, node: ir.Node) -> dict[str, ir.Value] | None:
        """Returns the values of the variables where `node` computes the formula; None where it does not."""
        if node.op_type != self.root or node.domain != "":
            return None
        for order in self._orders:
            match = order.match(model, model.graph, node, check_nodes_are_removable=False)
            if match:
                found: dict[str, ir.Value] = dict(match.bindings)
                if self.holds(**found):
                    return found
        return None
