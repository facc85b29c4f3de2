# SPDX-License-Identifier: Apache-2.0
"""SpecVerify over a draft vocabulary -> SpecVerify over the target's, for backends whose body supports only one.

A draft distribution [.., draft_vocab] is read through the inverse of `d2t`: token t has the probability of the draft
token that maps to it, or 0. The gather reads and writes a distribution once, whatever the vocabularies are.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.errors import PassError
from speccompile.passes.base import Pass, Property
from speccompile.passes.edit import OPS_DOMAIN, Editor, nodes_of, weight_of
from speccompile.passes.match import static_dim

_NUM_INPUTS = 8  # of SpecVerify over one vocabulary; d2t is the ninth


def _mapped(model: ir.Model) -> list[ir.Node]:
    return [n for n in nodes_of(model, "SpecVerify", OPS_DOMAIN) if len(n.inputs) > _NUM_INPUTS and n.inputs[-1]]


def _find_mapped(model: ir.Model) -> str | None:
    nodes = _mapped(model)
    return f"{len(nodes)} SpecVerify nodes with a draft vocabulary are left" if nodes else None


ONE_VOCABULARY = Property("one_vocabulary", _find_mapped)


def expand_draft_probs(model: ir.Model) -> int:
    """Rewrite every SpecVerify that has `d2t`; returns their number.

    Raises:
        PassError: `d2t` is not a constant, or the width of the draft distributions is decided at run time.
    """
    nodes = _mapped(model)
    for node in nodes:
        dists, vocab, table = node.inputs[3], static_dim(node.inputs[0], -1), weight_of(node.inputs[_NUM_INPUTS])
        width = static_dim(dists, -1)
        if table is None or vocab is None or width is None:
            faults = (("d2t", table), ("the vocabulary of logits", vocab), ("draft_vocab", width))
            missing = ", ".join(name for name, value in faults if value is None)
            todo = "Pin the dim, or keep drafts with distributions and drafts without them in graphs of their own."
            raise PassError("node SpecVerify", f"{missing} known at run time only", "known at build", todo)
        inputs = list(node.inputs[:_NUM_INPUTS])
        if width > 1:
            inputs[3] = _expanded(Editor(model, node), dists, table.numpy(), width, vocab)
        outputs = Editor(model, node).op("SpecVerify", *inputs, domain=OPS_DOMAIN, num_outputs=3)
        for old, new in zip(node.outputs, outputs, strict=True):
            new.shape, new.type = old.shape, old.type
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [], node.outputs, outputs)
    return len(nodes)


def _expanded(edit: Editor, dists: ir.Value | None, d2t: np.ndarray, width: int, vocab: int) -> ir.Value:
    columns = np.full(vocab, width, np.int64)  # a column of zeros follows the distribution
    columns[d2t] = np.arange(width)
    padded = edit.op("Pad", dists, edit.ints([0, 1]), edit.const(np.float32(0), "draft_dists.none"), edit.ints([2]))
    expanded: ir.Value = edit.op("Gather", padded, edit.const(columns, "draft_dists.t2d"), axis=2)
    expanded.shape = ir.Shape([*(dists.shape or ())[:2], vocab]) if dists is not None else None
    expanded.type = ir.TensorType(ir.DataType.FLOAT)
    return expanded


EXPAND_DRAFT_DISTS = Pass("expand_draft_probs", expand_draft_probs, ensures=(ONE_VOCABULARY,))
