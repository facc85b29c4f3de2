# SPDX-License-Identifier: Apache-2.0
"""Walk and WalkProbs as TensorRT builds them: no branch. It has no double, so weights of prefixes are unrolled."""

from __future__ import annotations

from dataclasses import replace

from speccompile.ops.op import Op
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
