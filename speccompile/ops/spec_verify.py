# SPDX-License-Identifier: Apache-2.0
"""SpecVerify: the acceptance rule on a target's logits, so that logits stay in the engine.

A greedy step of one node costs one argmax, one of more nodes about 10 us on [batch, nodes]; softmax runs for sampled
batches only, sorting only where top_k or top_p is on.
"""

from __future__ import annotations

import numpy as np

from speccompile.core.acceptance import accept
from speccompile.core.sampling import warp
from speccompile.core.specs import DRAFT_PROBS, LOGITS, UNIFORMS, TensorSpec
from speccompile.core.tree import Floats, Ints, TokenTree
from speccompile.ops.op import Op
from speccompile.ops.walk import TREE_INPUTS, VERDICT
from speccompile.ops.warp import WARP_INPUTS


def spec_verify(
    logits: Floats,
    tokens: Ints,
    parents: Ints,
    draft_probs: Floats,
    uniforms: Floats,
    temperature: Floats,
    top_k: Ints,
    top_p: Floats,
    d2t: Ints | None = None,
) -> tuple[Ints, Ints, Ints]:
    """The numpy twin. Returns path [batch, nodes], num_accepted [batch], next_token [batch], all int64.

    Args:
        logits: [batch, nodes, vocab] float32.
        tokens: [batch, nodes] int64.
        parents: [batch, nodes] int64; that of node 0 is not read.
        draft_probs: [batch, nodes, draft_vocab] float32; draft_vocab 1 = deterministic drafts.
        uniforms: [batch, nodes, 2] float32 in [0, 1): accept draw of the node and draw made at it where drafts have
            distributions; the draws of the race at the node where they are deterministic.
        temperature: [batch] float32.
        top_k: [batch] int64.
        top_p: [batch] float32.
        d2t: [draft_vocab] int64, distinct: the target token of each draft token; None: they are the same. Only the
            plugin has it as an input (the ninth); deterministic drafts do not use it.
    """
    if d2t is not None and draft_probs.shape[-1] > 1:
        spread = np.zeros(logits.shape, dtype=np.float32)
        spread[..., d2t] = draft_probs
        draft_probs = spread
    tree = TokenTree(tokens, parents, np.full(len(tokens), tokens.shape[1], dtype=np.int64), draft_probs)
    verdict = accept(tree, warp(logits, temperature, top_k, top_p), uniforms)
    return verdict.path, verdict.num_accepted, verdict.next_token


SPEC_VERIFY = Op(
    "SpecVerify",
    (
        TensorSpec(LOGITS, ("batch", "nodes", "vocab"), "float32"),
        *TREE_INPUTS,
        TensorSpec(DRAFT_PROBS, ("batch", "nodes", "draft_vocab"), "float32"),
        TensorSpec(UNIFORMS, ("batch", "nodes", 2), "float32"),
        *WARP_INPUTS,
    ),
    VERDICT,
    spec_verify,
    """
    is_sampled = ReduceMax(temperature, keepdims=0) > 0.0
    is_plain = ~is_sampled & Squeeze(Shape(tokens, start=1) == 1)
    path, num_accepted, next_token = If(is_plain) <
      then_branch = plain () => (int64[] path_root, int64[] num_none, int64[] next_best) {
        best = speccompile.FirstMax(logits)
        path_root = best - best
        next_best = Squeeze(best, [1])
        num_none = next_best - next_best
      },
      else_branch = scored () => (int64[] path_scored, int64[] num_scored, int64[] next_scored) {
    is_by_dists = is_sampled & (Shape(draft_probs, start=2) > 1)
    path_scored, num_scored, next_scored = If(is_by_dists) <
      then_branch = by_dists () => (int64[] path_dists, int64[] num_dists, int64[] next_dists) {
        target_probs = speccompile.Warp(logits, temperature, top_k, top_p)
        path_dists, num_dists, next_dists = speccompile.WalkProbs(target_probs, tokens, parents, draft_probs, uniforms)
      },
      else_branch = by_token () => (int64[] path_token, int64[] num_token, int64[] next_drawn) {
        drawn = If(is_sampled) <
          then_branch = sampled () => (int64[] drawn_sampled) {
            probs = speccompile.Warp(logits, temperature, top_k, top_p)
            drawn_sampled = speccompile.Race(probs, uniforms)
          },
          else_branch = greedy () => (int64[] drawn_greedy) {
            drawn_greedy = speccompile.FirstMax(logits)
          }>
        path_token, num_token, next_drawn = speccompile.Walk(drawn, tokens, parents)
      }>
      }>
    """,
    uses=("Warp", "WalkProbs", "Race", "FirstMax", "Walk"),
)
