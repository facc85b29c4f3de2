# SPDX-License-Identifier: Apache-2.0
"""Walk and WalkProbs as TensorRT builds them: no loop, no branch.

With draft distributions each refused sibling changes the residual against which the next one is verified, so the walk
through a tree is unrolled over the nodes, and so are the weights of a chain's prefixes, as TensorRT has no double.
"""

from __future__ import annotations

from dataclasses import replace

from speccompile.ops.op import Op
from speccompile.ops.walk import (
    BY_SLOT,
    NEXT_TOKEN_OF_DIST,
    PATH_OF_ALIVE,
    PROBS_HEAD,
    RACED,
    WALK,
    WALK_PROBS,
    block_body,
    offer,
    walk_body,
)


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
    kept, weights = (", ".join(f"{name}_{n}" for n in (0, *nodes)) for name in ("kept", "weight"))
    offers = "".join(
        f"{offer(f'[{node}]', f'_{node}', f'_{node - 1}')}kept_{node} = int64(is_kept_{node})\n" for node in nodes
    )
    return f"""
    drafts = Expand(draft_probs, Shape(target_probs))
    {PROBS_HEAD}
    limit = Identity([{len(nodes) + 1}])
    pads = Concat([0], Max(limit - num_nodes1, [0]), axis=0)
    surplus = Concat([0], Max(num_nodes1 - limit, [0]), axis=0)
    links = Pad(link, pads, -1, [1])
    tokens_used = Pad(used, pads, 0, [1])
    accepts = Pad(accept_draws, pads, 0.0, [1])
    dist_0 = Identity(dist_root)
    at_0 = Identity(at_root)
    kept_0 = Expand(1, column)
    {offers}
    dist_tree = Identity(dist_{nodes[-1]})
    alive = Slice(Pad(Concat({kept}, axis=1), surplus, 0, [1]), [0], num_nodes1, [1])
    {PATH_OF_ALIVE}
    is_on = (link == previous) & (nodes < limit) & (nodes > 0)
    is_on_chain = CumSum(int64(~is_on), 1) == 1
    targets_at = Pad(target_at, pads, 0.0, [1])
    drafts_at = Pad(draft_at, pads, 1.0, [1])
    weight_0 = Expand(1.0, column)
    {"".join(map(_weigh, nodes))}
    weight = Slice(Pad(Concat({weights}, axis=1), surplus, 0.0, [1]), [0], num_nodes1, [1])
    {block_body("float32")}
    {BY_SLOT}
    path = Identity(path_of_slot)
    num = Identity(num_of_slot)
    end = Identity(end_of_slot)
    dist = Identity(dist_of_slot)
    {NEXT_TOKEN_OF_DIST}
    next_token = Squeeze(Where(has_drafts, drawn, {RACED}), [1])
    """


def walk_ops(max_nodes: int) -> tuple[Op, Op]:
    return replace(WALK, body=walk_body(max_nodes)), replace(WALK_PROBS, body=walk_probs_body(max_nodes))
