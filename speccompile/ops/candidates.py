# SPDX-License-Identifier: Apache-2.0
"""A draft's candidates after each of its nodes: TopTokens gives the likeliest tokens, NodeProbs the warped probs.

Candidates make deterministic trees and need no warp. Distributions are for sampled trees, whose siblings are drawn on
the host.
"""

from __future__ import annotations

import numpy as np

from speccompile.core.sampling import warp
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES, LOGITS, NODE_PROBS, TEMPERATURE, TensorSpec
from speccompile.core.tree import Floats, Ints
from speccompile.ops.dists import ROWS
from speccompile.ops.op import Op
from speccompile.ops.warp import WARP_INPUTS

_CANDIDATE_ROWS = ("batch", "nodes", "candidates")


def top_tokens(logits: Floats, *, num_candidates: int = 8) -> tuple[Ints, Floats]:
    """The numpy twin of TopTokens, of logits [batch, nodes, vocab] float32 and at most vocab candidates.

    Returns:
        candidates [batch, nodes, num_candidates] int64, the likeliest first, ties by index (TensorRT may order ties
        differently, which changes no output); candidate_probs, of the same shape, float32, at temperature 1.
    """
    candidates = np.argsort(-logits, axis=-1, kind="stable")[..., :num_candidates].astype(np.int64)
    parts = np.exp((logits - logits.max(axis=-1, keepdims=True)).astype(np.float64))
    probs = (parts / parts.sum(axis=-1, keepdims=True)).astype(np.float32)
    return candidates, np.take_along_axis(probs, candidates, axis=-1)


def node_probs(logits: Floats, temperature: Floats, top_k: Ints, top_p: Floats) -> tuple[Floats]:
    """The numpy twin of NodeProbs; `temperature`, `top_p` [batch] float32, `top_k` [batch] int64.

    Returns [batch, nodes, vocab] float32 of logits alike, or zeros [batch, nodes, 1] when every slot is greedy.
    """
    if not np.any(np.asarray(temperature) > 0):
        return (np.zeros((*logits.shape[:2], 1), dtype=np.float32),)
    return (warp(logits, temperature, top_k, top_p),)


TOP_TOKENS = Op(
    "TopTokens",
    (TensorSpec(LOGITS, ROWS, "float32"),),
    (TensorSpec(CANDIDATES, _CANDIDATE_ROWS, "int64"), TensorSpec(CANDIDATE_PROBS, _CANDIDATE_ROWS, "float32")),
    top_tokens,
    """
    scores = float32(logits)
    tops, candidates = TopK(scores, Reshape(attr.num_candidates, [1]), axis=2)
    candidate_probs = GatherND(Softmax(scores, axis=-1), Unsqueeze(candidates, [-1]), batch_dims=2)
    """,
    attributes={"num_candidates": 8},
)

NODE_PROBS_OP = Op(
    "NodeProbs",
    (TensorSpec(LOGITS, ROWS, "float32"), *WARP_INPUTS),
    (TensorSpec(NODE_PROBS, ("batch", "nodes", "draft_vocab"), "float32"),),
    node_probs,
    f"""
    is_sampled = ReduceMax({TEMPERATURE}, keepdims=0) > 0.0
    node_probs = If(is_sampled) <
      then_branch = sampled () => (float[] dists_hot) {{
        dists_hot = speccompile.Warp(logits, temperature, top_k, top_p)
      }},
      else_branch = greedy () => (float[] dists_cold) {{
        dists_cold = Expand(0.0, Concat(Shape(logits, end=2), [1], axis=0))
      }}>
    """,
    uses=("Warp",),
)
