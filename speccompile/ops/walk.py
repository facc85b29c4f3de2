# SPDX-License-Identifier: Apache-2.0
"""Walk and WalkProbs: the accepted path through a tree, by the token drawn at each node or by draft distributions.

Walk has no branch and no loop, and walks through trees by doubling. WalkProbs has a Loop over a tree's nodes, which
`ops.tensorrt.walk` unrolls; it verifies a slot's chain as a block and draws by race where a slot has no drafts,
whatever other slots have.
"""

from __future__ import annotations

import numpy as np

from speccompile.core.acceptance import accept
from speccompile.core.specs import (
    DRAFT_PROBS,
    NEXT_TOKEN,
    NUM_ACCEPTED,
    PARENTS,
    PATH,
    TOKENS,
    UNIFORMS,
    TensorSpec,
)
from speccompile.core.tree import Floats, Ints, TokenTree
from speccompile.ops.op import Op

TREE_INPUTS = (
    TensorSpec(TOKENS, ("batch", "nodes"), "int64"),
    TensorSpec(PARENTS, ("batch", "nodes"), "int64"),
)
MOST_NODES = 1025  # of a scored tree: the most that a recipe allows, and the root
VERDICT = (
    TensorSpec(PATH, ("batch", "nodes"), "int64"),
    TensorSpec(NUM_ACCEPTED, ("batch",), "int64"),
    TensorSpec(NEXT_TOKEN, ("batch",), "int64"),
)


def _walk(drawn: Ints, tokens: Ints, parents: Ints) -> tuple[Ints, Ints, Ints]:
    dists = np.eye(int(max(drawn.max(), tokens.max())) + 1, dtype=np.float32)[drawn]
    tree = TokenTree(tokens, parents, np.full(len(tokens), tokens.shape[1], dtype=np.int64))
    verdict = accept(tree, dists, np.zeros((*tokens.shape, 2), dtype=np.float32))
    return verdict.path, verdict.num_accepted, verdict.next_token


def _walk_probs(
    target_probs: Floats, tokens: Ints, parents: Ints, draft_probs: Floats, uniforms: Floats
) -> tuple[Ints, Ints, Ints]:
    tree = TokenTree(tokens, parents, np.full(len(tokens), tokens.shape[1], dtype=np.int64), draft_probs)
    verdict = accept(tree, target_probs, uniforms)
    return verdict.path, verdict.num_accepted, verdict.next_token


# `link` is the parent clipped to what precedes the node: -1 at the root, whatever the prefill's gather wrote there.
LINKS = """
    num_nodes1 = Shape(tokens, start=1)
    nodes = Range(0, Squeeze(num_nodes1), 1)
    previous = nodes - 1
    link = Min(parents, previous)
    parent = Max(link, 0)
"""

# Nodes grow along a path, so the k-th node on it is the one up to which k + 1 are counted.
PATH_OF_ALIVE = """
    depth = Where(alive > 0, CumSum(alive, 1) - 1, -1)
    is_place = Unsqueeze(nodes, [-1]) == Unsqueeze(depth, [1])
    path_alive = ReduceMax(Where(is_place, nodes, -1), [-1], keepdims=0)
    end_alive = ReduceMax(Where(alive > 0, nodes, 0), [1], keepdims=1)
    num_alive = ReduceMax(depth, [1], keepdims=1)
"""


def walk_body(max_nodes: int) -> str:
    """Returns the statements of Walk for trees of at most `max_nodes` nodes; further nodes are never kept.

    A draft that is kept by its token alone does not depend on other drafts, so paths are followed by doubling.
    """
    most = max(max_nodes, 2)
    rounds = range((most - 1).bit_length())
    jumps = "".join(
        f"""
    alive_{number + 1} = Min(alive_{number}, GatherElements(alive_{number}, jump_{number}, axis=1))
    jump_{number + 1} = GatherElements(jump_{number}, jump_{number}, axis=1)"""
        for number in rounds
    )
    return f"""{LINKS}
    is_match = (tokens == GatherElements(drawn, parent, axis=1)) & (link >= 0) & (nodes < {most})
    match_link = Where(is_match, link, -1)
    is_later = Unsqueeze(nodes, [-1]) > nodes
    shadow = int64((Unsqueeze(match_link, [-1]) == Unsqueeze(match_link, [1])) & is_later)
    kept = int64(is_match) - ReduceMax(shadow, [-1], keepdims=0)
    alive_0 = Max(kept, int64(nodes == 0))
    jump_0 = Identity(parent){jumps}
    alive = Identity(alive_{len(rounds)})
    {PATH_OF_ALIVE}
    path = Identity(path_alive)
    num_accepted = Squeeze(num_alive, [1])
    next_token = Squeeze(GatherElements(drawn, end_alive, axis=1), [1])
    """


WALK = Op(
    "Walk",
    (TensorSpec("drawn", ("batch", "nodes"), "int64"), *TREE_INPUTS),
    VERDICT,
    _walk,
    walk_body(MOST_NODES),
)


def offer(node: str, new: str, old: str) -> str:
    """Returns statements that verify one node and, where it is refused, form the residual for its next sibling.

    Args:
        node: [1] int64; one beyond the last has the link -1.
        new: ending of the names `at`, `dist` and `is_kept` after the node; `old`: before it.
    """
    return f"""
    row{new} = Min({node}, num_nodes1 - [1])
    is_child{new} = Gather(links, {node}, axis=1) == at{old}
    token{new} = Gather(tokens_used, {node}, axis=1)
    draft{new} = Squeeze(Gather(drafts, row{new}, axis=1), [1])
    bar{new} = Gather(accepts, {node}, axis=1) * Unsqueeze(GatherND(draft{new}, token{new}, batch_dims=1), [1])
    is_kept{new} = is_child{new} & (bar{new} < Unsqueeze(GatherND(dist{old}, token{new}, batch_dims=1), [1]))
    left{new} = Relu(dist{old} - draft{new})
    mass{new} = ReduceSum(left{new}, [1], keepdims=1)
    rest{new} = Where(is_child{new} & (mass{new} > 0.0), left{new} / mass{new}, dist{old})
    dist{new} = Where(is_kept{new}, Squeeze(Gather(target_probs, row{new}, axis=1), [1]), rest{new})
    at{new} = Where(is_kept{new}, {node}, at{old})
    """


# What WalkProbs reads of a tree; `drafts` are the distributions [batch, nodes, vocab].
PROBS_HEAD = f"""{LINKS}
    used = Where(link >= 0, tokens, 0)
    used3 = Unsqueeze(used, [-1])
    target_at = GatherND(target_probs, Concat(Unsqueeze(parent, [-1]), used3, axis=2), batch_dims=1)
    draft_at = GatherND(drafts, used3, batch_dims=2)
    accept_draws = Gather(uniforms, 0, axis=2)
    root_draw = Gather(accept_draws, [0], axis=1)
    dist_root = Squeeze(Gather(target_probs, [0], axis=1), [1])
    column = Concat(Shape(tokens, end=1), [1], axis=0)
    at_root = Expand(0, column)
"""


def block_body(real: str) -> str:
    """Returns statements for the verdict of a chain as a block (`core.acceptance.keep_block`), `path_block` and so on.

    Args:
        real: type of `weight` [batch, nodes], of the prefix that ends at each node.
    """
    return f"""
    chain_end = ReduceMax(Where(is_on_chain, nodes, -1), [1], keepdims=1)
    draft_next = Gather(drafts, Min(nodes + 1, Squeeze(num_nodes1) - 1), axis=1)
    rests = Relu(Unsqueeze(float32(weight), [-1]) * target_probs - draft_next)
    rest_sum = {real}(ReduceSum(rests, [-1], keepdims=0))
    pass_inside = Where(weight >= {real}(1.0), {real}(1.0), rest_sum / (rest_sum + ({real}(1.0) - weight)))
    is_passed = ({real}(accept_draws) < Where(nodes == chain_end, weight, pass_inside)) & is_on_chain
    end_block = ReduceMax(Where(is_passed, nodes, 0), [1], keepdims=1)
    path_block = Where(nodes <= end_block, nodes, -1)
    rest_dist = GatherND(rests, end_block, batch_dims=1)
    is_rest = (end_block < chain_end) & (ReduceSum(rest_dist, [1], keepdims=1) > 0.0)
    dist_block = Where(is_rest, rest_dist, GatherND(target_probs, end_block, batch_dims=1))
    branch = Min(previous - link, link + 1)
    is_branched = (ReduceMax(branch, [1], keepdims=1) > 0) | (root_draw < 0.0)
"""


# By slot: the verdict of a tree, whose last distribution is `dist_tree`, or that of a chain.
BY_SLOT = """
    path_of_slot = Where(is_branched, path_alive, path_block)
    num_of_slot = Where(is_branched, num_alive, end_block)
    end_of_slot = Where(is_branched, end_alive, end_block)
    dist_of_slot = Where(is_branched, dist_tree, dist_block)
"""
NEXT_TOKEN_OF_DIST = """
    drawn = speccompile.Draw(Unsqueeze(dist, [1]), GatherElements(Gather(uniforms, 1, axis=2), end, axis=1))
    num_accepted = Squeeze(num, [1])
    has_drafts = ReduceMax(link, [1], keepdims=1) >= 0
"""
RACED = "speccompile.Race(Gather(target_probs, [0], axis=1), Gather(uniforms, [0], axis=1))"

# The weight of a prefix in closed form: with S the running sum of log ratios it is exp(S - max(0, running maximum of
# S)), in double; a token that the target cannot give ends the sum at -1e30. One pass over the nodes in index order is
# a walk through a tree: children come after parents, siblings in their order.
_WALK_PROBS = f"""
    drafts = Identity(draft_probs)
    {PROBS_HEAD}
    is_on_chain = CumSum(int64(link < 0), 1) == 1
    log_ratio = Log(Max(double(target_at), double(1e-300))) - Log(Max(double(draft_at), double(1e-300)))
    log_possible = Where(target_at > 0.0, log_ratio, double(-1e30))
    log_sum = CumSum(Where(nodes == 0, double(0.0), log_possible), 1)
    log_before = Where(nodes > Unsqueeze(nodes, [-1]), double(0.0), Unsqueeze(log_sum, [1]))
    weight = Exp(log_sum - Max(ReduceMax(log_before, [-1], keepdims=0), double(0.0)))
    {block_body("double")}
    has_tree = boolean(ReduceMax(int64(is_branched), keepdims=0))
    path, num, end, dist = If(has_tree) <
      then_branch = tree () => (int64[] path_of_slot, int64[] num_of_slot, int64[] end_of_slot, float[] dist_of_slot) {{
        links = Identity(link)
        tokens_used = Identity(used)
        accepts = Identity(accept_draws)
        go = Identity(boolean(1))
        is_start = Expand(nodes == 0, Shape(tokens))
        rounds = Squeeze(num_nodes1) - 1
        end_tree, dist_tree, is_reached = Loop(rounds, go, at_root, dist_root, is_start) <body = step
          (int64 i, bool go_on, int64[] at_in, float[] dist_in, bool[] is_seen)
          => (bool same, int64[] at_out, float[] dist_out, bool[] is_seen_now) {{
            same = Identity(go_on)
            node = Unsqueeze(i + 1, [0])
            any_child = boolean(ReduceMax(int32(Gather(links, node, axis=1) == at_in), keepdims=0))
            at_out, dist_out, is_seen_now = If(any_child) <
              then_branch = offer () => (int64[] at_then, float[] dist_then, bool[] seen_then) {{
                {offer("node", "_then", "_in")}
                seen_then = is_seen | (is_kept_then & (nodes == node))
              }},
              else_branch = pass_by () => (int64[] at_else, float[] dist_else, bool[] seen_else) {{
                at_else = Identity(at_in)
                dist_else = Identity(dist_in)
                seen_else = Identity(is_seen)
              }}>
          }}>
        alive = int64(is_reached)
        {PATH_OF_ALIVE}
        {BY_SLOT}
      }},
      else_branch = chain () => (int64[] path_chain, int64[] num_chain, int64[] end_chain, float[] dist_chain) {{
        path_chain = Identity(path_block)
        num_chain = Identity(end_block)
        end_chain = Identity(end_block)
        dist_chain = Identity(dist_block)
      }}>
    {NEXT_TOKEN_OF_DIST}
    all_draft = boolean(ReduceMin(int64(has_drafts), keepdims=0))
    next_any = If(all_draft) <
      then_branch = drafting () => (int64[] next_drawn) {{
        next_drawn = Identity(drawn)
      }},
      else_branch = some_plain () => (int64[] next_mixed) {{
        next_mixed = Where(has_drafts, drawn, {RACED})
      }}>
    next_token = Squeeze(next_any, [1])
    """

WALK_PROBS = Op(
    "WalkProbs",
    (
        TensorSpec("target_probs", ("batch", "nodes", "vocab"), "float32"),
        *TREE_INPUTS,
        TensorSpec(DRAFT_PROBS, ("batch", "nodes", "vocab"), "float32"),
        TensorSpec(UNIFORMS, ("batch", "nodes", 2), "float32"),
    ),
    VERDICT,
    _walk_probs,
    _WALK_PROBS,
    uses=("Draw", "Race"),
)
