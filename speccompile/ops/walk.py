# SPDX-License-Identifier: Apache-2.0
"""Walk and WalkProbs: the accepted path through a tree, by the token drawn at each node or by draft distributions.

A chain needs a running sum; a tree a Loop, one round per accepted node (Walk) or per node (WalkProbs), which verifies a
chain as a block and draws by race where a slot has no drafts.
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

# `core.acceptance.keep_block`. The weight of a prefix in closed form: with S the running sum of log ratios it is
# exp(S - max(0, running maximum of S)), in double; a token that the target cannot give ends the sum at -1e30.
_BLOCK = """
    is_broken = Less(link, none)
    broken = Cast<to = 7>(is_broken)
    num_broken = CumSum(broken, one)
    is_on_chain = Equal(num_broken, one)
    on_chain = Where(is_on_chain, nodes, no_node)
    chain_end = ReduceMax<keepdims = 1>(on_chain, second)
    at_parent = Concat<axis = 2>(parent3, token3)
    target_at_chain = GatherND<batch_dims = 1>(target_probs, at_parent)
    draft_at_chain = GatherND<batch_dims = 2>(draft_probs, token3)
    nothing = Constant<value = double {0.0}>()
    whole = Constant<value = double {1.0}>()
    little = Constant<value = double {1e-300}>()
    hopeless = Constant<value = double {-1e30}>()
    target64 = Cast<to = 11>(target_at_chain)
    draft64 = Cast<to = 11>(draft_at_chain)
    is_possible = Greater(target64, nothing)
    target_safe = Max(target64, little)
    draft_safe = Max(draft64, little)
    target_log = Log(target_safe)
    draft_log = Log(draft_safe)
    log_ratio = Sub(target_log, draft_log)
    log_possible = Where(is_possible, log_ratio, hopeless)
    is_first = Equal(nodes, none)
    log_step = Where(is_first, nothing, log_possible)
    log_sum = CumSum(log_step, one)
    log_row = Unsqueeze(log_sum, second)
    node_column = Unsqueeze(nodes, last)
    is_later = Greater(nodes, node_column)
    log_before = Where(is_later, nothing, log_row)
    log_most = ReduceMax<keepdims = 0>(log_before, last)
    log_cap = Max(log_most, nothing)
    log_weight = Sub(log_sum, log_cap)
    weight = Exp(log_weight)
    weight32 = Cast<to = 1>(weight)
    weight3 = Unsqueeze(weight32, last)
    scaled = Mul(weight3, target_probs)
    node_after = Add(nodes, one)
    next_node = Min(node_after, highest)
    draft_next = Gather<axis = 1>(draft_probs, next_node)
    surplus = Sub(scaled, draft_next)
    rest_scaled = Relu(surplus)
    sum32 = ReduceSum<keepdims = 0>(rest_scaled, last)
    rest_sum = Cast<to = 11>(sum32)
    missing = Sub(whole, weight)
    rest_and_missing = Add(rest_sum, missing)
    share = Div(rest_sum, rest_and_missing)
    is_whole = GreaterOrEqual(weight, whole)
    pass_inside = Where(is_whole, whole, share)
    is_chain_end = Equal(nodes, chain_end)
    pass_prob = Where(is_chain_end, weight, pass_inside)
    accept64 = Cast<to = 11>(accept_draws)
    is_under_pass = Less(accept64, pass_prob)
    is_passed = And(is_under_pass, is_on_chain)
    passed = Where(is_passed, nodes, none)
    end_block = ReduceMax<keepdims = 1>(passed, second)
    is_kept_block = LessOrEqual(nodes, end_block)
    path_block = Where(is_kept_block, nodes, no_node)
    rest_dist = GatherND<batch_dims = 1>(rest_scaled, end_block)
    rest_mass = ReduceSum<keepdims = 1>(rest_dist, second)
    has_rest = Greater(rest_mass, off)
    is_inside = Less(end_block, chain_end)
    is_rest = And(is_inside, has_rest)
    end_dist = GatherND<batch_dims = 1>(target_probs, end_block)
    dist_block = Where(is_rest, rest_dist, end_dist)
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
    root_draw = Gather<axis = 1>(accept_draws, nowhere)
    least_root_draw = ReduceMin<keepdims = 0>(root_draw)
    has_marked = Less(least_root_draw, off)
    has_tree = Or(is_tree, has_marked)
    is_linked = GreaterOrEqual(link, none)
    token_used = Where(is_linked, tokens, none)
    token3 = Unsqueeze(token_used, last)
    parent3 = Unsqueeze(parent, last)
    {_BLOCK}
    path, num_accepted1, end, dist = If(has_tree) <
      then_branch = tree () => (int64[] path_mixed, int64[] num_mixed, int64[] end_mixed, float[] dist_mixed) {{
        {_DISTS_TREE}
        widest_of_slot = ReduceMax<keepdims = 1>(branch, second)
        is_wide = Greater(widest_of_slot, none)
        is_marked = Less(root_draw, off)
        is_branched = Or(is_wide, is_marked)
        path_mixed = Where(is_branched, path_tree, path_block)
        num_mixed = Where(is_branched, deepest, end_block)
        end_mixed = Where(is_branched, end_tree, end_block)
        dist_mixed = Where(is_branched, dist_tree, dist_block)
      }},
      else_branch = chain () => (int64[] path_chain, int64[] num_chain, int64[] end_chain, float[] dist_chain) {{
        path_chain = Identity(path_block)
        num_chain = Identity(end_block)
        end_chain = Identity(end_block)
        dist_chain = Identity(dist_block)
      }}>
    u_end = GatherElements<axis = 1>(node_draws, end)
    dist3 = Unsqueeze(dist, second)
    next1 = speccompile.Draw(dist3, u_end)
    num_accepted = Squeeze(num_accepted1, second)
    farthest = ReduceMax<keepdims = 1>(link, second)
    has_drafts = GreaterOrEqual(farthest, none)
    has_drafts_int = Cast<to = 7>(has_drafts)
    least_drafts = ReduceMin<keepdims = 0>(has_drafts_int)
    all_draft = Cast<to = 9>(least_drafts)
    next_any = If(all_draft) <
      then_branch = drafting () => (int64[] next_drawn) {{ next_drawn = Identity(next1) }},
      else_branch = some_plain () => (int64[] next_mixed) {{
        root_row = Gather<axis = 1>(target_probs, nowhere)
        root_draws = Gather<axis = 1>(uniforms, nowhere)
        raced = speccompile.Race(root_row, root_draws)
        next_mixed = Where(has_drafts, next1, raced)
      }}>
    next_token = Squeeze(next_any, second)
    """,
    uses=("Draw", "Race"),
)
