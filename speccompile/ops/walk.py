# SPDX-License-Identifier: Apache-2.0
"""Walk and WalkProbs: the accepted path through a tree, by the token drawn at each node or by draft distributions.

A chain needs a running sum; a tree is walked by a Loop, one round per accepted node (Walk) or per node (WalkProbs).
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
_LINKS = """
    none = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    no_node = Constant<value_int = -1>()
    second = Constant<value_ints = [1]>()
    num_nodes1 = Shape<start = 1>(tokens)
    num_nodes = Squeeze(num_nodes1)
    highest = Sub(num_nodes, one)
    previous = Range(no_node, highest, one)
    nodes = Add(previous, one)
    link = Min(parents, previous)
    gap = Sub(previous, link)
    link_next = Add(link, one)
    branch = Min(gap, link_next)
    widest = ReduceMax<keepdims = 0>(branch)
    is_tree = Greater(widest, none)
    parent = Max(link, none)
"""

# A chain's path ends at the first node that is not kept; the root always counts as one.
_CHAIN = """
        is_refused = Less(kept_link, none)
        refused = Cast<to = 7>(is_refused)
        num_refused = CumSum(refused, one)
        is_on_chain = Equal(num_refused, one)
        path_chain = Where(is_on_chain, nodes, no_node)
        end_chain = ReduceMax<keepdims = 1>(path_chain, second)
"""

# Indices grow along a path, so the k-th node reached is the k-th of the path.
_PATH_OF_REACHED = """
        reached = Cast<to = 7>(is_reached)
        counted = CumSum(reached, one)
        depth = Sub(counted, one)
        marked = Where(is_reached, nodes, no_node)
        blank = Expand(no_node, tree_shape)
        path_tree = ScatterElements<axis = 1, reduction = "max">(blank, depth, marked)
        deepest = ReduceMax<keepdims = 1>(depth, second)
"""

_START = """
        tree_shape = Shape(tokens)
        at_root = Equal(nodes, none)
        is_start = Expand(at_root, tree_shape)
        slots = Shape<end = 1>(tokens)
        column = Concat<axis = 0>(slots, second)
        root = Expand(none, column)
        go = Constant<value = bool {1}>()
"""

# Node 0 is no node's child, so 0 as "the first child that matches" means that there is none.
WALK = Op(
    "Walk",
    (TensorSpec("drawn", ("batch", "nodes"), "int64"), *TREE_INPUTS),
    VERDICT,
    _walk,
    f"""{_LINKS}
    wanted = GatherElements<axis = 1>(drawn, parent)
    is_drawn = Equal(tokens, wanted)
    kept_link = Where(is_drawn, link, no_node)
    path, num_accepted1, end = If(is_tree) <
      then_branch = tree () => (int64[] path_tree, int64[] deepest, int64[] end_tree) {{ {_START}
        end_tree, is_reached = Loop(num_nodes, go, root, is_start) <body = step
          (int64 i, bool go_on, int64[] at, bool[] is_seen) => (bool is_moving, int64[] next_at, bool[] is_seen_now) {{
            is_hit = Equal(kept_link, at)
            hit = Cast<to = 6>(is_hit)
            child = ArgMax<axis = 1, keepdims = 1>(hit)
            is_found = Greater(child, none)
            next_at = Where(is_found, child, at)
            is_here = Equal(nodes, next_at)
            is_seen_now = Or(is_seen, is_here)
            last_child = ReduceMax<keepdims = 0>(child)
            is_moving = Greater(last_child, none)
          }}>
        {_PATH_OF_REACHED}
      }},
      else_branch = chain () => (int64[] path_chain, int64[] end_chain, int64[] end_same) {{ {_CHAIN}
        end_same = Identity(end_chain)
      }}>
    next1 = GatherElements<axis = 1>(drawn, end)
    num_accepted = Squeeze(num_accepted1, second)
    next_token = Squeeze(next1, second)
    """,
)

_RESIDUAL = """
        over = Sub(dist_in, draft_dist)
        left = Relu(over)
        mass = ReduceSum<keepdims = 1>(left, second)
        has_mass = Greater(mass, off)
"""

# One pass over the nodes in index order is a walk: children come after parents, siblings in their order.
_DISTS_TREE = f"""{_START}
        rounds = Sub(num_nodes, one)
        root_place = Constant<value_int = 0>()
        root_dist = Gather<axis = 1>(target_probs, root_place)
        end_tree, dist_tree, is_reached = Loop(rounds, go, root, root_dist, is_start) <body = step
          (int64 i, bool go_on, int64[] at, float[] dist_in, bool[] is_seen)
          => (bool same, int64[] next_at, float[] dist_out, bool[] is_seen_now) {{
            same = Identity(go_on)
            node = Add(i, one)
            node1 = Unsqueeze(node, nowhere)
            node_link = Gather<axis = 1>(link, node1)
            is_child = Equal(node_link, at)
            child = Cast<to = 6>(is_child)
            any_child1 = ReduceMax<keepdims = 0>(child)
            any_child = Cast<to = 9>(any_child1)
            next_at, dist_out, is_seen_now = If(any_child) <
              then_branch = offer () => (int64[] at_then, float[] dist_then, bool[] seen_then) {{
                token = Gather<axis = 1>(token_used, node1)
                draft_dist = Gather<axis = 1>(draft_probs, node)
                target_at1 = GatherND<batch_dims = 1>(dist_in, token)
                target_at = Unsqueeze(target_at1, second)
                draft_at1 = GatherND<batch_dims = 1>(draft_dist, token)
                draft_at = Unsqueeze(draft_at1, second)
                u = Gather<axis = 1>(accept_draws, node1)
                bar = Mul(u, draft_at)
                is_under = Less(bar, target_at)
                is_kept = And(is_child, is_under)
                {_RESIDUAL}
                refused_dist = Div(left, mass)
                rest = Where(has_mass, refused_dist, dist_in)
                own_dist = Gather<axis = 1>(target_probs, node)
                dist_child = Where(is_kept, own_dist, rest)
                dist_then = Where(is_child, dist_child, dist_in)
                at_then = Where(is_kept, node, at)
                is_here = Equal(nodes, node)
                is_new = And(is_kept, is_here)
                seen_then = Or(is_seen, is_new)
              }},
              else_branch = pass_by () => (int64[] at_else, float[] dist_else, bool[] seen_else) {{
                at_else = Identity(at)
                dist_else = Identity(dist_in)
                seen_else = Identity(is_seen)
              }}>
          }}>
        {_PATH_OF_REACHED}
"""

# Only the end of the path needs a residual, and a chain has one child there.
_DISTS_CHAIN = f"""
        at_parent = Concat<axis = 2>(parent3, token3)
        target_at = GatherND<batch_dims = 1>(target_probs, at_parent)
        draft_at = GatherND<batch_dims = 2>(draft_probs, token3)
        bar = Mul(accept_draws, draft_at)
        is_under = Less(bar, target_at)
        kept_link = Where(is_under, link, no_node)
        {_CHAIN}
        end_same = Identity(end_chain)
        after = Add(end_chain, one)
        child = Min(after, highest)
        child_link = GatherElements<axis = 1>(link, child)
        is_child = Equal(child_link, end_chain)
        dist_in = GatherND<batch_dims = 1>(target_probs, end_chain)
        draft_dist = GatherND<batch_dims = 1>(draft_probs, child)
        {_RESIDUAL}
        is_rest = And(is_child, has_mass)
        dist_chain = Where(is_rest, left, dist_in)
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
    f"""{_LINKS}
    off = Constant<value_float = 0.0>()
    nowhere = Constant<value_ints = [0]>()
    last = Constant<value_ints = [-1]>()
    first_draw = Constant<value_int = 0>()
    accept_draws = Gather<axis = 2>(uniforms, first_draw)
    node_draws = Gather<axis = 2>(uniforms, one)
    is_linked = GreaterOrEqual(link, none)
    token_used = Where(is_linked, tokens, none)
    token3 = Unsqueeze(token_used, last)
    parent3 = Unsqueeze(parent, last)
    path, num_accepted1, end, dist = If(is_tree) <
      then_branch = tree () => (int64[] path_tree, int64[] deepest, int64[] end_tree, float[] dist_tree) {{
        {_DISTS_TREE}
      }},
      else_branch = chain () => (int64[] path_chain, int64[] end_chain, int64[] end_same, float[] dist_chain) {{
        {_DISTS_CHAIN}
      }}>
    u_end = GatherElements<axis = 1>(node_draws, end)
    dist3 = Unsqueeze(dist, second)
    next1 = speccompile.Draw(dist3, u_end)
    num_accepted = Squeeze(num_accepted1, second)
    next_token = Squeeze(next1, second)
    """,
    uses=("Draw",),
)
