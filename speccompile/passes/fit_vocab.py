# SPDX-License-Identifier: Apache-2.0
"""Map a draft's logits to the target's vocabulary, where the two are padded differently.

Everything after the logits (candidates, confidences, draws and the distributions they were drawn from) is then in the
target's tokens: tokens that the target lacks are cut before normalisation, so they are never proposed, and tokens
that the draft lacks have probability 0.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from speccompile.core.specs import LOGITS, TOKENS, GraphSpec
from speccompile.passes.edit import Editor, input_of

ABSENT = np.float32(-65504)  # float16's lowest: finite in every dtype, and exp of it is 0


def fit_vocab(model: ir.Model, spec: GraphSpec) -> int:
    """Give the logits `spec.vocab_size` columns; returns 1 where they had another number, 0 otherwise.

    A draft with fewer tokens reads its last one, which is padding, for each token beyond them.

    Args:
        model: a decoder without a tail; `logits` [batch, scored, draft's vocabulary] is an output.
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
