# SPDX-License-Identifier: Apache-2.0
"""What a draft guesses behind each of its nodes: TopTokens gives the likeliest tokens, NodeLaws the warped laws.

Guesses make deterministic trees and need no warp. Laws are for trees that are drawn: siblings are drawn from them
one after another without replacement, on the host, as their number is small and their order matters.
"""

from __future__ import annotations

import numpy as np

from speccompile.core.sampling import warp
from speccompile.core.specs import GUESS_PROBS, GUESSES, LOGITS, NODE_LAWS, TEMPERATURE, TensorSpec
from speccompile.core.tree import Floats, Ints
from speccompile.ops.laws import ROWS
from speccompile.ops.op import Op
from speccompile.ops.warp import WARP_INPUTS

_GUESS_ROWS = ("batch", "nodes", "guesses")


def top_tokens(logits: Floats, *, num_guesses: int = 8) -> tuple[Ints, Floats]:
    """The numpy twin of TopTokens.

    Args:
        logits: [batch, nodes, vocab] float32.
        num_guesses: at most vocab.

    Returns:
        guesses [batch, nodes, num_guesses] int64, the likeliest first, ties by index (TensorRT may order ties in
        another way: a guess is no more than that); guess_probs, of the same shape, float32, at temperature 1.
    """
    guesses = np.argsort(-logits, axis=-1, kind="stable")[..., :num_guesses].astype(np.int64)
    parts = np.exp((logits - logits.max(axis=-1, keepdims=True)).astype(np.float64))
    probs = (parts / parts.sum(axis=-1, keepdims=True)).astype(np.float32)
    return guesses, np.take_along_axis(probs, guesses, axis=-1)


def node_laws(logits: Floats, temperature: Floats, top_k: Ints, top_p: Floats) -> tuple[Floats]:
    """The numpy twin of NodeLaws.

    Args:
        logits: [batch, nodes, vocab] float32.
        temperature: [batch] float32.
        top_k: [batch] int64.
        top_p: [batch] float32.

    Returns:
        node_laws [batch, nodes, vocab] float32, or zeros [batch, nodes, 1] when every slot is greedy.
    """
    if not np.any(np.asarray(temperature) > 0):
        return (np.zeros((*logits.shape[:2], 1), dtype=np.float32),)
    return (warp(logits, temperature, top_k, top_p),)


_K = """
    asked = Constant<value_int: int = @num_guesses>()
    unit = Constant<value_ints = [1]>()
    num = Reshape(asked, unit)
"""

TOP_TOKENS = Op(
    "TopTokens",
    (TensorSpec(LOGITS, ROWS, "float32"),),
    (TensorSpec(GUESSES, _GUESS_ROWS, "int64"), TensorSpec(GUESS_PROBS, _GUESS_ROWS, "float32")),
    top_tokens,
    f"""{_K}
    last = Constant<value_ints = [-1]>()
    tops, guesses = TopK<axis = 2>(logits, num)
    plain = Softmax<axis = -1>(logits)
    places = Unsqueeze(guesses, last)
    guess_probs = GatherND<batch_dims = 2>(plain, places)
    """,
    attributes={"num_guesses": 8},
)

NODE_LAWS_OP = Op(
    "NodeLaws",
    (TensorSpec(LOGITS, ROWS, "float32"), *WARP_INPUTS),
    (TensorSpec(NODE_LAWS, ("batch", "nodes", "draft_vocab"), "float32"),),
    node_laws,
    f"""
    off = Constant<value_float = 0.0>()
    hottest = ReduceMax<keepdims = 0>({TEMPERATURE})
    is_sampled = Greater(hottest, off)
    node_laws = If(is_sampled) <
      then_branch = sampled () => (float[] laws_hot) {{
        laws_hot = speccompile.Warp(logits, temperature, top_k, top_p)
      }},
      else_branch = greedy () => (float[] laws_cold) {{
        unit = Constant<value_ints = [1]>()
        rows = Shape<end = 2>(logits)
        dummy = Concat<axis = 0>(rows, unit)
        laws_cold = Expand(off, dummy)
      }}>
    """,
    uses=("Warp",),
)
