# SPDX-License-Identifier: Apache-2.0
"""Chooses candidates before logits of a part of the vocabulary are spread over all of it, and spreads few."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from speccompile.passes.base import as_pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, nodes_of, replace, weight_of
from speccompile.passes.match import int_attribute, only_use, producer, rank, scalar, static_dim

_LEAST = -1e4  # a logit below this has no probability


@dataclass(frozen=True)
class _Spread:
    logits: ir.Value  # [batch, nodes, kept]
    padded: ir.Value  # and one that is very low
    index: ir.Value  # [vocab] int64: where each token is among `padded`
    vocab: int
    tokens: np.ndarray  # [kept] int64, rising: the token of each logit


def _spread_of(value: ir.Value | None) -> _Spread | None:
    gather = producer(value, "Gather")
    joined = producer(gather.inputs[0], "Concat") if gather is not None else None
    if gather is None or joined is None or rank(gather.inputs[0]) != 3 or len(joined.inputs) != 2:
        return None
    if int_attribute(gather, "axis", 0) not in (2, -1) or int_attribute(joined, "axis", 0) not in (2, -1):
        return None
    logits, fill = joined.inputs
    filled = producer(fill, "Expand")
    lowest, held, num = scalar(filled.inputs[0] if filled else None), weight_of(gather.inputs[1]), static_dim(logits, 2)
    if logits is None or lowest is None or lowest > _LEAST or held is None or num is None or static_dim(fill, 2) != 1:
        return None
    index = held.numpy()
    tokens = np.flatnonzero(index < num)
    if index.ndim != 1 or not np.array_equal(index[tokens], np.arange(num)):
        return None  # ties are decided by the order of tokens
    assert gather.inputs[0] is not None and gather.inputs[1] is not None
    return _Spread(logits, gather.inputs[0], gather.inputs[1], len(index), tokens)


def _choose(model: ir.Model, node: ir.Node, found: _Spread) -> None:
    edit = Editor(model, node)
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    chosen, probs = edit.op("TopTokens", found.logits, domain=OPS_DOMAIN, num_outputs=2, **attributes)
    candidates = edit.op("Gather", edit.const(found.tokens, f"{found.index.name}.tokens"), chosen, axis=0)
    for old, new in zip((node.outputs[0], *node.outputs), (chosen, candidates, probs), strict=True):
        new.type, new.shape = old.type, old.shape
    replace(node, candidates, probs)


def _spread_if_sampled(model: ir.Model, node: ir.Node, found: _Spread) -> None:
    # With a temperature of 0 everywhere NodeProbs gives zeros [batch, nodes, 1] of any logits.
    edit, temperature = Editor(model, node), node.inputs[1]
    is_sampled = edit.op("Greater", edit.op("ReduceMax", temperature), edit.const(np.zeros(1, np.float32), "float.0"))
    num = edit.op("Where", edit.op("Squeeze", is_sampled), edit.ints([found.vocab]), edit.ints([1]))
    index = edit.op("Slice", found.index, edit.ints([0]), num, edit.ints([0]))
    spread = edit.op("Gather", found.padded, index, axis=2)
    spread.type = found.logits.type
    node.replace_input_with(0, spread)


@as_pass()
def spread_late(model: ir.Model) -> int:
    """Rewrites each TopTokens and NodeProbs of spread logits; returns their number."""
    count = 0
    for node in nodes_of(model, "TopTokens", OPS_DOMAIN):
        found = _spread_of(node.inputs[0])
        if found is not None and int_attribute(node, "num_candidates", 8) <= len(found.tokens):
            _choose(model, node, found)
            count += 1
    for node in nodes_of(model, "NodeProbs", OPS_DOMAIN):
        found, spread = _spread_of(node.inputs[0]), node.inputs[0]
        if found is not None and spread is not None and only_use(spread) is node:
            _spread_if_sampled(model, node, found)
            count += 1
    return count
