# SPDX-License-Identifier: Apache-2.0
"""Walk and WalkProbs as TensorRT builds them: no loop, no branch.

A draft that is accepted by its token alone does not depend on others, so paths are followed by doubling. With draft
distributions, each refused sibling changes the residual of the next: the walk is unrolled over the nodes. Chains are
verified as a block, for which only the weights of the prefixes are unrolled.
"""

from __future__ import annotations

from dataclasses import replace

from speccompile.ops.op import Op
from speccompile.ops.walk import WALK, WALK_PROBS

# `link` is the parent clipped to what precedes the node: -1 at the root, whatever the prefill's gather wrote there.
_LINKS = """
    none = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    no_node = Constant<value_int = -1>()
    first = Constant<value_ints = [0]>()
    second = Constant<value_ints = [1]>()
    last = Constant<value_ints = [-1]>()
    num_nodes1 = Shape<start = 1>(tokens)
    num_nodes = Squeeze(num_nodes1)
    index = Range(none, num_nodes, one)
    previous = Sub(index, one)
    link = Min(parents, previous)
    parent = Max(link, none)
"""

# Indices grow along a path, so the k-th node on it is the one up to which k + 1 are counted.
_PATH = """
    counted = CumSum(alive, one)
    depth = Sub(counted, one)
    is_alive = Greater(alive, none)
    depth_alive = Where(is_alive, depth, no_node)
    index_column = Unsqueeze(index, last)
    depth_row = Unsqueeze(depth_alive, second)
    is_place = Equal(index_column, depth_row)
    placed = Where(is_place, index, no_node)
    path = ReduceMax<keepdims = 0>(placed, last)
    reached = Where(is_alive, index, none)
    end = ReduceMax<keepdims = 1>(reached, second)
    num_alive = ReduceSum<keepdims = 0>(alive, second)
    num_accepted = Sub(num_alive, one)
"""


def walk_body(max_nodes: int) -> str:
    """Returns the statements of Walk for trees of at most `max_nodes` nodes; further nodes are never kept."""
    most = max(max_nodes, 2)
    text = f"""{_LINKS}
    wanted = GatherElements<axis = 1>(drawn, parent)
    is_drawn = Equal(tokens, wanted)
    is_linked = GreaterOrEqual(link, none)
    limit = Constant<value_int = {most}>()
    is_known = Less(index, limit)
    is_usable = And(is_linked, is_known)
    is_match = And(is_drawn, is_usable)
    match_link = Where(is_match, link, no_node)
    own_link = Unsqueeze(match_link, last)
    other_link = Unsqueeze(match_link, second)
    is_sibling = Equal(own_link, other_link)
    index_own = Unsqueeze(index, last)
    is_before = Greater(index_own, index)
    is_shadow = And(is_sibling, is_before)
    shadow = Cast<to = 7>(is_shadow)
    shadowed = ReduceMax<keepdims = 0>(shadow, last)
    match = Cast<to = 7>(is_match)
    kept = Sub(match, shadowed)
    is_root = Equal(index, none)
    root = Cast<to = 7>(is_root)
    alive_0 = Max(kept, root)
    jump_0 = Identity(parent)
    """
    rounds = (most - 1).bit_length()
    for number in range(rounds):
        text += f"""
    above_{number} = GatherElements<axis = 1>(alive_{number}, jump_{number})
    alive_{number + 1} = Min(alive_{number}, above_{number})
    jump_{number + 1} = GatherElements<axis = 1>(jump_{number}, jump_{number})
    """
    return f"""{text}
    alive = Identity(alive_{rounds})
    {_PATH}
    next1 = GatherElements<axis = 1>(drawn, end)
    next_token = Squeeze(next1, second)
    """


def _offer(node: int) -> str:
    """Returns statements that verify one node and, where it is refused, form the residual for its next sibling."""
    n, m = f"_{node}", f"_{node - 1}"
    return f"""
    node{n} = Constant<value_ints = [{node}]>()
    row{n} = Min(node{n}, top_node)
    link{n} = Gather<axis = 1>(links, node{n})
    is_child{n} = Equal(link{n}, at{m})
    token{n} = Gather<axis = 1>(tokens_used, node{n})
    u{n} = Gather<axis = 1>(accepts, node{n})
    draft1{n} = Gather<axis = 1>(draft_probs, row{n})
    draft0{n} = Squeeze(draft1{n}, second)
    draft_dist{n} = Expand(draft0{n}, dist_shape)
    target_at{n} = GatherElements<axis = 1>(dist{m}, token{n})
    draft_at{n} = GatherElements<axis = 1>(draft_dist{n}, token{n})
    bar{n} = Mul(u{n}, draft_at{n})
    is_under{n} = Less(bar{n}, target_at{n})
    is_kept{n} = And(is_child{n}, is_under{n})
    over{n} = Sub(dist{m}, draft_dist{n})
    left{n} = Relu(over{n})
    mass{n} = ReduceSum<keepdims = 1>(left{n}, second)
    has_mass{n} = Greater(mass{n}, off)
    refused_dist{n} = Div(left{n}, mass{n})
    is_rest{n} = And(is_child{n}, has_mass{n})
    rest{n} = Where(is_rest{n}, refused_dist{n}, dist{m})
    own1{n} = Gather<axis = 1>(target_probs, row{n})
    own{n} = Squeeze(own1{n}, second)
    dist{n} = Where(is_kept{n}, own{n}, rest{n})
    at{n} = Where(is_kept{n}, node{n}, at{m})
    kept{n} = Cast<to = 7>(is_kept{n})
    """


def _weigh(node: int) -> str:
    """Returns statements for the weight [batch, 1] of the prefix that ends at a node (`core.acceptance.keep_block`)."""
    n, m = f"_{node}", f"_{node - 1}"
    return f"""
    node_target{n} = Gather<axis = 1>(targets_at, node{n})
    node_draft{n} = Gather<axis = 1>(drafts_at, node{n})
    prefix_mass{n} = Mul(weight{m}, node_target{n})
    prefix_ratio{n} = Div(prefix_mass{n}, node_draft{n})
    is_light{n} = Less(prefix_mass{n}, node_draft{n})
    has_prefix{n} = Greater(prefix_mass{n}, off)
    weight_held{n} = Where(has_prefix{n}, on, off)
    weight{n} = Where(is_light{n}, prefix_ratio{n}, weight_held{n})
    """


def _block(max_nodes: int) -> str:
    """Returns statements for `path_block`, `end_block`, `dist_block`: the verdict of slots whose drafts are chains."""
    nodes = range(1, max_nodes)
    weights = ", ".join(f"weight_{n}" for n in (0, *nodes))
    text = """
    on = Constant<value_float = 1.0>()
    is_known_link = Less(index, limit)
    is_near = Equal(link, previous)
    is_inner = Greater(index, none)
    is_near_known = And(is_near, is_known_link)
    is_on = And(is_near_known, is_inner)
    is_off_chain = Not(is_on)
    off_chain = Cast<to = 7>(is_off_chain)
    num_off = CumSum(off_chain, one)
    is_on_chain = Equal(num_off, one)
    on_chain = Where(is_on_chain, index, no_node)
    chain_end = ReduceMax<keepdims = 1>(on_chain, second)
    used3 = Unsqueeze(used, last)
    parent3 = Unsqueeze(parent, last)
    at_parent = Concat<axis = 2>(parent3, used3)
    target_at_all = GatherND<batch_dims = 1>(target_probs, at_parent)
    row_shape = Shape(target_probs)
    drafts = Expand(draft_probs, row_shape)
    draft_at_all = GatherND<batch_dims = 2>(drafts, used3)
    targets_at = Pad(target_at_all, pads, off, second)
    drafts_at = Pad(draft_at_all, pads, on, second)
    weight_0 = Expand(on, root_shape)
    """
    text += "".join(_weigh(node) for node in nodes)
    return f"""{text}
    weights_long = Concat<axis = 1>({weights})
    weights_padded = Pad(weights_long, surplus, off, second)
    weight = Slice(weights_padded, first, num_nodes1, second)
    weight3 = Unsqueeze(weight, last)
    scaled = Mul(weight3, target_probs)
    index_after = Add(index, one)
    highest = Sub(num_nodes, one)
    index_next = Min(index_after, highest)
    draft_next = Gather<axis = 1>(drafts, index_next)
    over_next = Sub(scaled, draft_next)
    rests = Relu(over_next)
    rest_sum = ReduceSum<keepdims = 0>(rests, last)
    lacking = Sub(on, weight)
    rest_and_lacking = Add(rest_sum, lacking)
    share = Div(rest_sum, rest_and_lacking)
    is_whole = GreaterOrEqual(weight, on)
    pass_inside = Where(is_whole, on, share)
    is_chain_end = Equal(index, chain_end)
    pass_prob = Where(is_chain_end, weight, pass_inside)
    is_under_pass = Less(accept_draws, pass_prob)
    is_passed = And(is_under_pass, is_on_chain)
    passed = Where(is_passed, index, none)
    end_block = ReduceMax<keepdims = 1>(passed, second)
    is_kept_block = LessOrEqual(index, end_block)
    path_block = Where(is_kept_block, index, no_node)
    rest_dist = GatherND<batch_dims = 1>(rests, end_block)
    rest_mass = ReduceSum<keepdims = 1>(rest_dist, second)
    has_rest = Greater(rest_mass, off)
    is_inside = Less(end_block, chain_end)
    is_block_rest = And(is_inside, has_rest)
    end_dist = GatherND<batch_dims = 1>(target_probs, end_block)
    dist_block = Where(is_block_rest, rest_dist, end_dist)
    gap = Sub(previous, link)
    link_after = Add(link, one)
    branch = Min(gap, link_after)
    widest = ReduceMax<keepdims = 1>(branch, second)
    is_wide = Greater(widest, none)
    root_draw = Gather<axis = 1>(accept_draws, first)
    is_marked = Less(root_draw, off)
    is_branched = Or(is_wide, is_marked)
    """


def walk_probs_body(max_nodes: int) -> str:
    """Returns the statements of WalkProbs for trees of at most `max_nodes` nodes; further nodes are never kept.

    `draft_probs` may be [batch, nodes, 1]: then only its shape is used.
    """
    nodes = range(1, max(max_nodes, 2))
    text = f"""{_LINKS}
    off = Constant<value_float = 0.0>()
    third = Constant<value_ints = [2]>()
    top_node1 = Sub(num_nodes1, second)
    top_node = Identity(top_node1)
    limit = Constant<value_ints = [{len(nodes) + 1}]>()
    missing0 = Sub(limit, num_nodes1)
    missing = Max(missing0, first)
    pads = Concat<axis = 0>(first, missing)
    is_linked = GreaterOrEqual(link, none)
    used = Where(is_linked, tokens, none)
    links = Pad(link, pads, no_node, second)
    tokens_used = Pad(used, pads, none, second)
    accept_draws = Gather<axis = 2>(uniforms, none)
    accepts = Pad(accept_draws, pads, off, second)
    node_draws = Gather<axis = 2>(uniforms, one)
    slots = Shape<end = 1>(target_probs)
    vocab = Shape<start = 2>(target_probs)
    dist_shape = Concat<axis = 0>(slots, vocab)
    root_dist = Gather<axis = 1>(target_probs, first)
    dist_0 = Squeeze(root_dist, second)
    root_shape = Concat<axis = 0>(slots, second)
    at_0 = Expand(none, root_shape)
    kept_0 = Expand(one, root_shape)
    """
    text += "".join(_offer(node) for node in nodes)
    kept = ", ".join(f"kept_{n}" for n in (0, *nodes))
    return f"""{text}
    kept_all = Concat<axis = 1>({kept})
    surplus0 = Sub(num_nodes1, limit)
    surplus1 = Max(surplus0, first)
    surplus = Concat<axis = 0>(first, surplus1)
    kept_long = Pad(kept_all, surplus, none, second)
    alive = Slice(kept_long, first, num_nodes1, second)
    {_PATH.replace("    path = ", "    path_tree = ").replace("    num_accepted = ", "    num_tree = ")}
    {_block(len(nodes) + 1)}
    path = Where(is_branched, path_tree, path_block)
    num_tree1 = Unsqueeze(num_tree, second)
    num_accepted1 = Where(is_branched, num_tree1, end_block)
    num_accepted = Squeeze(num_accepted1, second)
    end_node = Where(is_branched, end, end_block)
    dist_kept = Where(is_branched, dist_{nodes[-1]}, dist_block)
    u_end = GatherElements<axis = 1>(node_draws, end_node)
    dist_end = Unsqueeze(dist_kept, second)
    next1 = speccompile.Draw(dist_end, u_end)
    root_row = Gather<axis = 1>(target_probs, first)
    root_draws = Gather<axis = 1>(uniforms, first)
    raced = speccompile.Race(root_row, root_draws)
    farthest = ReduceMax<keepdims = 1>(link, second)
    has_drafts = GreaterOrEqual(farthest, none)
    next_any = Where(has_drafts, next1, raced)
    next_token = Squeeze(next_any, second)
    """


def walk_ops(max_nodes: int) -> tuple[Op, Op]:
    return (
        replace(WALK, body=walk_body(max_nodes), uses=(), sized_body=None),
        replace(WALK_PROBS, body=walk_probs_body(max_nodes), uses=("Draw", "Race"), sized_body=None),
    )
