# SPDX-License-Identifier: Apache-2.0
"""Attach verification to a target and candidates to a draft, so that logits stay in the engine."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.core import specs
from speccompile.core.specs import LOGITS, TOKENS, GraphSpec
from speccompile.passes.base import Pass
from speccompile.passes.edit import OPS_DOMAIN, Editor, add_input, input_of


def _output(model: ir.Model, name: str) -> ir.Value:
    return {v.name: v for v in model.graph.outputs}[name]


def _set_io(model: ir.Model, spec: specs.GraphSpec, made: dict[str, ir.Value]) -> None:
    held = {v.name: v for v in model.graph.inputs}
    model.graph.inputs[:] = [held[t.name] for t in spec.inputs]
    old = {v.name: v for v in model.graph.outputs}
    for tensor in spec.outputs:
        if tensor.name in made:
            value = made[tensor.name]
            value.name, value.shape = tensor.name, ir.Shape(list(tensor.dims))
            value.type = ir.TensorType(ir.DataType.INT64 if tensor.dtype == "int64" else ir.DataType.FLOAT)
            old[tensor.name] = value
    model.graph.outputs[:] = [old[t.name] for t in spec.outputs]
    model.graph.name = spec.name


def _add_inputs(model: ir.Model, spec: specs.GraphSpec) -> dict[str, ir.Value]:
    held = {v.name: v for v in model.graph.inputs if v.name is not None}
    return held | {t.name: add_input(model, t.name, t.dims, t.dtype) for t in spec.inputs if t.name not in held}


def attach_verify(model: ir.Model, spec: specs.GraphSpec) -> int:
    """Add SpecVerify, and FiniteToken after it; `spec` is the `verified_spec` that the graph has afterwards."""
    values = _add_inputs(model, spec)
    edit = Editor(model)
    model.opset_imports[OPS_DOMAIN] = 1
    nodes = values[specs.SCORED_NODES]
    # Prefill scores one node of many, so only the scored nodes are verified.
    tokens = edit.op("GatherElements", values[specs.TOKENS], nodes, axis=1)
    parents = edit.op("GatherElements", values[specs.PARENTS], nodes, axis=1)
    rest = [values[n] for n in (specs.DRAFT_PROBS, specs.UNIFORMS, specs.TEMPERATURE, specs.TOP_K, specs.TOP_P)]
    logits = _output(model, specs.LOGITS)
    path, num_accepted, chosen = edit.op("SpecVerify", logits, tokens, parents, *rest, domain=OPS_DOMAIN, num_outputs=3)
    next_token = edit.op("FiniteToken", logits, chosen, domain=OPS_DOMAIN)
    names = (specs.PATH, specs.NUM_ACCEPTED, specs.NEXT_TOKEN)
    _set_io(model, spec, dict(zip(names, (path, num_accepted, next_token), strict=True)))
    return 1


def attach_candidates(model: ir.Model, spec: specs.GraphSpec) -> int:
    """Add TopTokens, and NodeProbs where `spec` has probs; `spec` is the `candidate_spec` of the graph afterwards."""
    values = _add_inputs(model, spec)
    edit = Editor(model)
    model.opset_imports[OPS_DOMAIN] = 1
    logits, num = _output(model, specs.LOGITS), spec.num_candidates
    candidates = edit.op("TopTokens", logits, domain=OPS_DOMAIN, num_outputs=2, num_candidates=num)
    made = dict(zip((specs.CANDIDATES, specs.CANDIDATE_PROBS), candidates, strict=True))
    if spec.gives_probs:
        warp = [values[n] for n in (specs.TEMPERATURE, specs.TOP_K, specs.TOP_P)]
        made[specs.NODE_PROBS] = edit.op("NodeProbs", logits, *warp, domain=OPS_DOMAIN)
    _set_io(model, spec, made)
    return 1


def attach_nothing(model: ir.Model, spec: specs.GraphSpec) -> int:
    """Add the inputs that `spec` has and the graph lacks; logits stay an output."""
    _add_inputs(model, spec)
    _set_io(model, spec, {})
    return 0


def attach_tail(spec: specs.GraphSpec) -> Pass:
    """Returns the pass that attaches the tail which `spec` declares, over the vocabulary of `spec`."""
    attach = _TAILS[spec.tail]

    def rewrite(model: ir.Model) -> int:
        return fit_vocab(model, spec) + attach(model, spec)

    return Pass(attach.__name__, rewrite)


_TAILS = {"none": attach_nothing, "candidates": attach_candidates, "verify": attach_verify}


ABSENT = np.float32(-65504)  # float16's lowest: finite in every dtype, and exp of it is 0


def fit_vocab(model: ir.Model, spec: GraphSpec) -> int:
    """Gives the logits of a decoder without a tail `spec.vocab_size` columns; returns 1 where they had others, else 0.

    Tokens that the target lacks are cut before normalisation; those that the draft lacks have probability 0.
    """
    position = next((i for i, value in enumerate(model.graph.outputs) if value.name == LOGITS), None)
    if position is None or not spec.vocab_size or spec.draft_vocab:
        return 0
    logits = model.graph.outputs[position]
    width = None if logits.shape is None else logits.shape[-1]
    if not isinstance(width, int) or width == spec.vocab_size:
        return 0
    edit = Editor(model)
    if width < spec.vocab_size:
        _clamp_tokens(model, width - 1)
        pads = edit.ints([0, 0, 0, 0, 0, spec.vocab_size - width])
        fitted = edit.op("Pad", logits, pads, edit.const(ABSENT, "logit_of_absent_token"), mode="constant")
    else:
        fitted = edit.op("Slice", logits, edit.ints([0]), edit.ints([spec.vocab_size]), edit.ints([2]))
    assert logits.shape is not None
    fitted.type, fitted.shape = logits.type, ir.Shape([*logits.shape[:-1], spec.vocab_size])
    fitted.name, logits.name = LOGITS, f"{LOGITS}.own"
    model.graph.outputs[position] = fitted
    return 1


def _clamp_tokens(model: ir.Model, last: int) -> None:
    tokens = input_of(model, TOKENS)
    readers = list(tokens.uses())
    edit = Editor(model, model.graph[0])
    known = edit.op("Min", tokens, edit.ints(last))
    known.type, known.shape = tokens.type, tokens.shape
    for reader in readers:
        reader.node.replace_input_with(reader.idx, known)
