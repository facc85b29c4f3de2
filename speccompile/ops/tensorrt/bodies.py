# SPDX-License-Identifier: Apache-2.0
"""The ops of a decoder as TensorRT builds them, and which form of SpecVerify a graph needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from speccompile.core.specs import NODE_PROBS, SAMPLED_PROBS, TensorSpec
from speccompile.ops.candidates import NODE_PROBS_OP, TOP_TOKENS
from speccompile.ops.conv_rows import CHAIN_CONV_ROWS
from speccompile.ops.finite_token import FINITE_TOKEN
from speccompile.ops.kv_rollback import KV_ROLLBACK
from speccompile.ops.op import Op
from speccompile.ops.sample_token import SAMPLE_TOKEN
from speccompile.ops.spec_verify import SPEC_VERIFY
from speccompile.ops.tensorrt.dists import LOCATE, TRT_DRAW, TRT_RACE, TRT_WARP
from speccompile.ops.walk import LINKS, RACED, WALK, WALK_PROBS, block_body, choice_body, chosen_body, walk_body


def _weigh(node: int) -> str:
    """Returns statements for the weight [batch, 1] of the prefix that ends at a node (`core.acceptance.keep_block`)."""
    n, m = f"_{node}", f"_{node - 1}"
    return f"""
    node_draft{n} = Gather(drafts_at, [{node}], axis=1)
    prefix_mass{n} = weight{m} * Gather(targets_at, [{node}], axis=1)
    whole{n} = Where(prefix_mass{n} > 0.0, 1.0, 0.0)
    weight{n} = Where(prefix_mass{n} < node_draft{n}, prefix_mass{n} / node_draft{n}, whole{n})
    """


def walk_probs_body(max_nodes: int) -> str:
    """Returns the statements of WalkProbs for trees of at most `max_nodes` nodes; further nodes are never kept.

    `draft_probs` may be [batch, nodes, 1]: then only its shape is used.
    """
    nodes = range(1, max(max_nodes, 2))
    weights = ", ".join(f"weight_{node}" for node in (0, *nodes))
    return f"""{LINKS}
    drafts = Expand(draft_probs, Shape(target_probs))
    {choice_body(max_nodes)}
    {chosen_body("float32")}
    chosen = Identity(factored)
    is_on = (alive > 0) & (nodes > 0)
    limit = Identity([{len(nodes) + 1}])
    pads = Concat([0], Max(limit - num_nodes1, [0]), axis=0)
    surplus = Concat([0], Max(num_nodes1 - limit, [0]), axis=0)
    targets_at = Pad(Where(is_on, target_at, 1.0), pads, 1.0, [1])
    drafts_at = Pad(Where(is_on, GatherND(chosen, at_token, batch_dims=1), 1.0), pads, 1.0, [1])
    weight_0 = Expand(1.0, Concat(Shape(tokens, end=1), [1], axis=0))
    {"".join(map(_weigh, nodes))}
    weight = Slice(Pad(Concat({weights}, axis=1), surplus, 0.0, [1]), [0], num_nodes1, [1])
    {block_body("float32")}
    next_token = Squeeze(Where(has_drafts, drawn, {RACED}), [1])
    """


def walk_ops(max_nodes: int) -> tuple[Op, Op]:
    return replace(WALK, body=walk_body(max_nodes)), replace(WALK_PROBS, body=walk_probs_body(max_nodes))


Drafts = Literal["tokens", "dists", "both"]

_SAMPLE_TOKEN = """
    scores = float32(logits)
    probs = speccompile.Warp(scores, temperature, top_k, top_p)
    drawn = speccompile.Draw(probs, Unsqueeze(uniforms, [1]))
    confidence = Squeeze(GatherElements(Softmax(scores, axis=-1), Unsqueeze(drawn, [1]), axis=2), [1, 2])
    sampled_token = Squeeze(drawn, [1])
    sampled_probs = Squeeze(probs, [1])
    """

_NODE_PROBS = """
    node_probs = speccompile.Warp(float32(logits), temperature, top_k, top_p)
    """

_TARGET = """
    target_probs = speccompile.Warp(float32(logits), temperature, top_k, top_p)
    """

_BY_TOKENS = """
    drawn = speccompile.Race(target_probs, uniforms)
    {0} = speccompile.Walk(drawn, tokens, parents)
    """

_BY_DISTS = """
    {0} = speccompile.WalkProbs(target_probs, tokens, parents, draft_probs, uniforms)
    """

_CHOICE = """
    has_probs = Shape(draft_probs, start=2) > 1
    path = Where(has_probs, path_dists, path_tokens)
    num_accepted = Where(has_probs, num_dists, num_tokens)
    next_token = Where(has_probs, next_dists, next_tokens)
    """

_VERDICT = "path, num_accepted, next_token"
# A greedy slot's distribution is one-hot, and then both rules keep the same drafts: distributions need
# not be skipped.
_SPEC_VERIFY: dict[Drafts, tuple[str, tuple[str, ...]]] = {
    "tokens": (_TARGET + _BY_TOKENS.format(_VERDICT), ("Warp", "Race", "Walk")),
    "dists": (_TARGET + _BY_DISTS.format(_VERDICT), ("Warp", "WalkProbs")),
    "both": (
        _TARGET
        + _BY_TOKENS.format("path_tokens, num_tokens, next_tokens")
        + _BY_DISTS.format("path_dists, num_dists, next_dists")
        + _CHOICE,
        ("Warp", "Race", "Walk", "WalkProbs"),
    ),
}


def drafts_from_width(draft_vocab: int | str | None, vocab: int | None) -> Drafts:
    """Returns the form of SpecVerify for draft distributions of this width; a name or None: decided at run time."""
    if draft_vocab == 1 and vocab != 1:
        return "tokens"
    return "dists" if isinstance(draft_vocab, int) and draft_vocab == vocab and vocab != 1 else "both"


def tensorrt_ops(drafts: Drafts, max_nodes: int) -> dict[str, Op]:
    """Returns the ops by name, with bodies for TensorRT; names and signatures are those of the ordinary ones.

    The ordinary FiniteToken and KVRollback build, the latter on inputs and outputs of the graph. GatedDelta's body is
    in `recurrence`; both ops of recurrent states are for chains alone.

    Args:
        drafts: `tokens`: draft_vocab is 1; `dists`: it is the target's; `both`: it may be either at run time.
        max_nodes: most nodes of a scored tree, the root included.
    """
    walk, walk_probs = walk_ops(max_nodes)
    verify, uses = _SPEC_VERIFY[drafts]
    *plain, dist = SAMPLE_TOKEN.outputs
    outputs = (*plain, TensorSpec(SAMPLED_PROBS, ("batch", "vocab"), dist.dtype))
    dists = (TensorSpec(NODE_PROBS, ("batch", "nodes", "vocab"), dist.dtype),)
    ops = (
        replace(SPEC_VERIFY, body=verify, uses=uses),
        replace(SAMPLE_TOKEN, outputs=outputs, body=_SAMPLE_TOKEN, uses=("Warp", "Draw")),
        TOP_TOKENS,
        replace(NODE_PROBS_OP, outputs=dists, body=_NODE_PROBS),
        FINITE_TOKEN,
        KV_ROLLBACK,
        CHAIN_CONV_ROWS,
        walk,
        walk_probs,
        TRT_WARP,
        TRT_DRAW,
        TRT_RACE,
        LOCATE,
    )
    return {op.name: op for op in ops}
