# SPDX-License-Identifier: Apache-2.0
"""SampleToken: a draft's own next token, its confidence, and the distribution from which it was drawn."""

from __future__ import annotations

import numpy as np

from speccompile.core.sampling import draw, warp
from speccompile.core.specs import CONFIDENCE, LOGITS, SAMPLED_PROBS, SAMPLED_TOKEN, UNIFORMS, TensorSpec
from speccompile.core.tree import Floats, Ints
from speccompile.ops.op import Op
from speccompile.ops.warp import WARP_INPUTS


def sample_token(
    logits: Floats, uniforms: Floats, temperature: Floats, top_k: Ints, top_p: Floats
) -> tuple[Ints, Floats, Floats]:
    """The numpy twin, of logits [batch, 1, vocab] float32; `uniforms` [batch] are in [0, 1).

    Args:
        temperature: [batch] float32.
        top_k: [batch] int64.
        top_p: [batch] float32.

    Returns:
        sampled_token [batch] int64; confidence [batch] float32, its probability at temperature 1; sampled_probs [batch,
        vocab] float32, or zeros [batch, 1] when every slot is greedy.
    """
    probs = warp(logits[:, 0], temperature, top_k, top_p)
    token = draw(probs, uniforms)
    batch = len(token)
    plain = warp(logits[:, 0], np.ones(batch), np.zeros(batch, dtype=np.int64), np.ones(batch))
    confidence = np.take_along_axis(plain, token[:, None], axis=1)[:, 0]
    if not np.any(temperature > 0):
        probs = np.zeros((batch, 1), dtype=np.float32)
    return token, confidence, probs


SAMPLE_TOKEN = Op(
    "SampleToken",
    (TensorSpec(LOGITS, ("batch", 1, "vocab"), "float32"), TensorSpec(UNIFORMS, ("batch",), "float32"), *WARP_INPUTS),
    (
        TensorSpec(SAMPLED_TOKEN, ("batch",), "int64"),
        TensorSpec(CONFIDENCE, ("batch",), "float32"),
        TensorSpec(SAMPLED_PROBS, ("batch", "draft_vocab"), "float32"),
    ),
    sample_token,
    """
    is_sampled = ReduceMax(temperature, keepdims=0) > 0.0
    sampled_token, confidence, sampled_probs = If(is_sampled) <
      then_branch = sampled () => (int64[] token_hot, float[] sure_hot, float[] probs_hot) {
        probs = speccompile.Warp(logits, temperature, top_k, top_p)
        drawn = speccompile.Draw(probs, Unsqueeze(uniforms, [1]))
        sure_hot = Squeeze(GatherND(Softmax(logits, axis=-1), Unsqueeze(drawn, [1]), batch_dims=2), [1])
        token_hot = Squeeze(drawn, [1])
        probs_hot = Squeeze(probs, [1])
      },
      else_branch = greedy () => (int64[] token_cold, float[] sure_cold, float[] probs_cold) {
        best = speccompile.FirstMax(logits)
        parts = Exp(logits - Unsqueeze(GatherND(logits, Unsqueeze(best, [1]), batch_dims=2), [1]))
        sure_cold = Reciprocal(ReduceSum(parts, [1, 2], keepdims=0))
        token_cold = Squeeze(best, [1])
        probs_cold = Expand(0.0, Shape(best))
      }>
    """,
    uses=("Warp", "Draw", "FirstMax"),
)
