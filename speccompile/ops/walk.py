# SPDX-License-Identifier: Apache-2.0
"""Walk and WalkProbs: the accepted path through a tree, by the token drawn at each node or by draft distributions.

Neither has a loop: paths are followed by doubling. WalkProbs chooses a path, verifies it as a block, and draws by race
where a slot has no drafts, whatever other slots have.
"""

from __future__ import annotations

import numpy as np

from speccompile.core.acceptance import accept
from speccompile.core.multi_path import RATIO_EDGES
from speccompile.core.specs import DRAFT_PROBS, NEXT_TOKEN, NUM_ACCEPTED, PARENTS, PATH, TOKENS, UNIFORMS, TensorSpec
from speccompile.core.tree import Floats, Ints, TokenTree
from speccompile.ops.op import Op

TREE_INPUTS = (TensorSpec(TOKENS, ("batch", "nodes"), "int64"), TensorSpec(PARENTS, ("batch", "nodes"), "int64"))
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
"""


def alive_body(max_nodes: int) -> str:
    """Returns statements for the nodes whose path from the root is `kept`, int64 1 where no sibling is kept as well."""
    rounds = range((max(max_nodes, 2) - 1).bit_length())
    jumps = "".join(
        f"""
    alive_{number + 1} = Min(alive_{number}, GatherElements(alive_{number}, jump_{number}, axis=1))
    jump_{number + 1} = GatherElements(jump_{number}, jump_{number}, axis=1)"""
        for number in rounds
    )
    return f"""
    alive_0 = Max(kept, int64(nodes == 0))
    jump_0 = Identity(parent){jumps}
    alive = Identity(alive_{len(rounds)})
    {PATH_OF_ALIVE}
    """


def walk_body(max_nodes: int) -> str:
    """Returns the statements of Walk for trees of at most `max_nodes` nodes; further nodes are never kept."""
    return f"""{LINKS}
    is_match = (tokens == GatherElements(drawn, parent, axis=1)) & (link >= 0) & (nodes < {max(max_nodes, 2)})
    match_link = Where(is_match, link, -1)
    is_later = Unsqueeze(nodes, [-1]) > nodes
    shadow = int64((Unsqueeze(match_link, [-1]) == Unsqueeze(match_link, [1])) & is_later)
    kept = int64(is_match) - ReduceMax(shadow, [-1], keepdims=0)
    {alive_body(max_nodes)}
    path = Identity(path_alive)
    num_accepted = Squeeze(ReduceMax(depth, [1], keepdims=1), [1])
    next_token = Squeeze(GatherElements(drawn, end_alive, axis=1), [1])
    """


WALK = Op(
    "Walk", (TensorSpec("drawn", ("batch", "nodes"), "int64"), *TREE_INPUTS), VERDICT, _walk, walk_body(MOST_NODES)
)


def choice_body(max_nodes: int) -> str:
    """Returns statements that choose a path (`core.multi_path.choose_path`); `drafts` are [batch, nodes, vocab]."""
    classes = " + ".join(f"int64(target_at > {edge!r} * draft_at)" for edge in RATIO_EDGES)
    return f"""
    used = Where(link >= 0, tokens, 0)
    at_token = Concat(Unsqueeze(parent, [-1]), Unsqueeze(used, [-1]), axis=2)
    target_at = GatherND(target_probs, at_token, batch_dims=1)
    draft_at = GatherND(drafts, Unsqueeze(used, [-1]), batch_dims=2)
    is_draft = (link >= 0) & (nodes < {max(max_nodes, 2)})
    child_link = Where(is_draft, link, -1)
    preference = ({classes}) * Squeeze(num_nodes1) - nodes
    is_better = Unsqueeze(preference, [-1]) < Unsqueeze(preference, [1])
    is_sibling = Unsqueeze(child_link, [-1]) == Unsqueeze(child_link, [1])
    kept = int64(is_draft) - ReduceMax(int64(is_sibling & is_better & Unsqueeze(is_draft, [-1])), [-1], keepdims=0)
    {alive_body(max_nodes)}
    is_child = Unsqueeze(nodes, [-1]) == Unsqueeze(child_link, [1])
    next = ReduceMax(Where(is_child & (Unsqueeze(alive, [1]) > 0), nodes, 0), [-1], keepdims=0)
    draft_next = GatherND(drafts, Unsqueeze(next, [-1]), batch_dims=1)
    num_children = ReduceSum(int64(is_child), [-1], keepdims=0)
    """


def chosen_body(real: str) -> str:
    """Returns statements for what the next node was chosen from (`core.multi_path.chosen_probs`), `factored`."""
    masses, factors, factor = "", "", "factor_0"
    for number, edge in enumerate(RATIO_EDGES):
        masses += f"""
    is_above_{number} = target_probs > {edge!r} * draft_next
    above_{number} = {real}(ReduceSum(Where(is_above_{number}, draft_next, 0.0), [-1], keepdims=1))
    upto_{number} = Max({real}(1.0) - above_{number}, {real}(0.0))"""
        factor = f"Where(is_above_{number}, factor_{number + 1}, {factor})"
    for number in range(len(RATIO_EDGES) + 1):
        upto = f"upto_{number}" if number < len(RATIO_EDGES) else f"{real}(1.0)"
        below = f"upto_{number - 1}" if number else f"{real}(0.0)"
        factors += f"""
    mass_{number} = {upto} - {below}
    slope_{number} = num * Pow(({upto} + {below}) * {real}(0.5), num - {real}(1.0))
    ratio_{number} = (Pow({upto}, num) - Pow({below}, num)) / Max(mass_{number}, {real}(1e-4))
    factor_{number} = float32(Where(mass_{number} > {real}(1e-4), ratio_{number}, slope_{number}))"""
    return f"""
    num = {real}(Unsqueeze(Max(num_children, 1), [-1])){masses}{factors}
    factored = draft_next * {factor}
    """


def block_body(real: str) -> str:
    """Returns statements for the verdict on the path as a block (`core.acceptance.keep_block`).

    Args:
        real: type of `weight` [batch, nodes], of the prefix that ends at each node.
    """
    return f"""
    rests = Relu(Unsqueeze(float32(weight), [-1]) * target_probs - chosen)
    rest_sum = {real}(ReduceSum(rests, [-1], keepdims=0))
    pass_inside = Where(weight >= {real}(1.0), {real}(1.0), rest_sum / (rest_sum + ({real}(1.0) - weight)))
    passes = Where(nodes == end_alive, weight, pass_inside)
    is_passed = ({real}(Gather(uniforms, 0, axis=2)) < passes) & (alive > 0)
    end = ReduceMax(Where(is_passed, nodes, 0), [1], keepdims=1)
    path = Where(path_alive <= end, path_alive, -1)
    num_accepted = Squeeze(GatherElements(depth, end, axis=1), [1])
    rest_dist = GatherND(rests, end, batch_dims=1)
    is_rest = (end < end_alive) & (ReduceSum(rest_dist, [1], keepdims=1) > 0.0)
    dist = Where(is_rest, rest_dist, GatherND(target_probs, end, batch_dims=1))
    drawn = speccompile.Draw(Unsqueeze(dist, [1]), GatherElements(Gather(uniforms, 1, axis=2), end, axis=1))
    has_drafts = ReduceMax(link, [1], keepdims=1) >= 0
    """


RACED = "speccompile.Race(Gather(target_probs, [0], axis=1), Gather(uniforms, [0], axis=1))"

# The weight of a prefix in closed form: with S the running sum of log ratios along the path it is exp(S - max(0, the
# running maximum of S)), in double; a token that the target cannot give ends the sum at -1e30.
_WALK_PROBS = f"""{LINKS}
    drafts = Identity(draft_probs)
    {choice_body(MOST_NODES)}
    has_siblings = ReduceMax(num_children, keepdims=0) > 1
    chosen = If(has_siblings) <
      then_branch = of_several () => (float[] factored) {{
        {chosen_body("double")}
      }},
      else_branch = of_one () => (float[] drafted) {{
        drafted = Identity(draft_next)
      }}>
    chosen_at = GatherND(chosen, at_token, batch_dims=1)
    log_ratio = Log(Max(double(target_at), double(1e-300))) - Log(Max(double(chosen_at), double(1e-300)))
    log_possible = Where(target_at > 0.0, log_ratio, double(-1e30))
    log_sum = CumSum(Where((alive > 0) & (nodes > 0), log_possible, double(0.0)), 1)
    log_before = Where(nodes > Unsqueeze(nodes, [-1]), double(0.0), Unsqueeze(log_sum, [1]))
    weight = Exp(log_sum - Max(ReduceMax(log_before, [-1], keepdims=0), double(0.0)))
    {block_body("double")}
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
