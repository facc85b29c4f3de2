# SPDX-License-Identifier: Apache-2.0
"""Drafts within a grammar: the draft's distributions are masked as the target's are, and forced tokens are drafts.

A refused draft has probability 0 in the target's distribution. What keeps the output distribution exact:

- deterministic ones may be left out, or replaced, at will: they are kept by match;
- drawn ones may be masked before the draw, and are verified with the masked and normalised distribution;
- chains drawn without a mask (by one run of a graph) may be cut after the first refused draft, but not before: its
  refusal moves its probability to other tokens, and the rest is never reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from speccompile.core.protocols import Batch, Outputs, TokenSequence
from speccompile.core.sampling import warp
from speccompile.core.sampling_params import SamplingParams
from speccompile.core.specs import CANDIDATE_PROBS, CANDIDATES, NODE_PROBS, TEMPERATURE, TOP_K, TOP_P
from speccompile.core.tree import Bools, Floats, Ints, TokenTree
from speccompile.drafting.tree import DraftTrees

FORCED = 1.0  # confidence of a token that alone may follow
NO_TOKEN = -1  # a candidate that the grammar refuses

Paths = Sequence[Sequence[Sequence[int] | None]]  # by slot and scored node: the drafts up to it; None: is not there


class Grammar(Protocol):
    """What may follow the text of a sequence; it has read all of its tokens."""

    def draft_mask(self, path: Sequence[int]) -> Bools | None:
        """Returns [vocab] bool, the tokens that may follow these drafts; None: nothing is known to."""
        ...

    def forced(self) -> Sequence[int]:
        """Returns the tokens that must follow the text, each of them the only one that may; empty where several may."""
        ...


def has_grammars(batch: Batch) -> bool:
    return any(sequence.grammar is not None for sequence in batch.sequences)


def draft_warp(batch: Batch) -> Mapping[str, NDArray[Any]]:
    """Returns `Batch.warp_feeds`, but for sequences with a grammar the temperature alone, 1 where they are greedy.

    Their mask comes before top-k and top-p, see `restrict`, and may exclude the most probable token.
    """
    feeds, num = batch.warp_feeds(), len(batch.sequences)
    heats, top_k = feeds.get(TEMPERATURE, np.zeros(num, np.float32)).copy(), feeds.get(TOP_K)
    top_p = feeds.get(TOP_P)
    top_k, top_p = (None if part is None else part.copy() for part in (top_k, top_p))
    for slot, sequence in enumerate(batch.sequences):
        if sequence.grammar is None:
            continue
        heats[slot] = sequence.sampling.temperature or 1.0
        if top_k is not None:
            top_k[slot] = 0
        if top_p is not None:
            top_p[slot] = 1
    named = {TEMPERATURE: heats, TOP_K: top_k, TOP_P: top_p}
    return {name: part for name, part in named.items() if part is not None}


def restrict(batch: Batch, paths: Paths, outputs: Outputs) -> Outputs:
    """Returns a draft's outputs after nodes, within the grammars; a token that alone may follow is the draft.

    Refused candidates are `NO_TOKEN` with probability 0 and come last; `node_probs` are masked, cut by top-k and top-p,
    and normalised, all 0 where the draft gives nothing that is allowed.

    Args:
        paths: see `Paths`; empty: the sequence takes no part.
        outputs: `candidates` and `candidate_probs` [batch, scored, candidates], and maybe `node_probs` [batch, scored,
            vocab], of `draft_warp` for sequences with a grammar.
    """
    if not has_grammars(batch):
        return outputs
    tokens, sure = np.array(outputs[CANDIDATES]), np.array(outputs[CANDIDATE_PROBS])
    probs = np.array(outputs[NODE_PROBS]) if NODE_PROBS in outputs else None
    for slot, (sequence, row) in enumerate(zip(batch.sequences, paths, strict=True)):
        if sequence.grammar is None:
            continue
        for column, path in enumerate(row):
            if path is None:
                continue
            dist = None if probs is None or probs.shape[-1] == 1 else probs[slot, column]
            _restrict_node(sequence, path, tokens[slot, column], sure[slot, column], dist)
    made = {**outputs, CANDIDATES: tokens, CANDIDATE_PROBS: sure}
    return made if probs is None else {**made, NODE_PROBS: probs}


def _restrict_node(
    sequence: TokenSequence, path: Sequence[int], tokens: Ints, sure: Floats, dist: Floats | None
) -> None:
    """Restricts what comes after one node, in place: candidates, their probabilities, and the distribution."""
    mask = sequence.grammar.draft_mask(path)
    num = 0 if mask is None else int(np.count_nonzero(mask))
    if mask is None or num == 1:
        tokens[:], sure[:] = NO_TOKEN, 0
        if dist is not None:
            dist[:] = 0 if mask is None else mask
        if mask is not None:
            tokens[0], sure[0] = mask.argmax(), FORCED
        return
    if dist is not None:
        dist[:] = _masked(dist, mask, sequence.sampling)
        num = min(len(tokens), len(dist))
        best = np.argpartition(-dist, num - 1)[:num]
        best = best[np.argsort(-dist[best], kind="stable")]
        tokens[:], sure[:] = NO_TOKEN, 0
        tokens[:num], sure[:num] = np.where(dist[best] > 0, best, NO_TOKEN), dist[best]
        return
    is_right = _allowed(mask, tokens)
    order = np.argsort(~is_right, kind="stable")
    refused = float(sure[~is_right].sum())
    left = np.minimum(sure[order] / max(1 - refused, 1e-3), 1)
    tokens[:], sure[:] = np.where(is_right[order], tokens[order], NO_TOKEN), np.where(is_right[order], left, 0)


def _allowed(mask: Bools, tokens: Ints) -> Bools:
    is_right: Bools = mask[np.clip(tokens, 0, len(mask) - 1)] & (tokens >= 0) & (tokens < len(mask))
    return is_right


def _masked(dist: Floats, mask: Bools, params: SamplingParams) -> Floats:
    kept = np.where(mask, dist, np.float32(0))
    mass = kept.sum(dtype=np.float64)
    if not mass > 0:
        return np.zeros_like(kept)
    if params.top_k or params.top_p < 1:
        with np.errstate(divide="ignore"):
            cut: Floats = warp(np.log(kept)[None], [1.0], [params.top_k], [params.top_p])[0]
        return cut
    normed: Floats = (kept / mass).astype(np.float32)
    return normed


def is_allowed(grammar: Grammar, path: Sequence[int], token: int) -> bool:
    mask = grammar.draft_mask(path)
    return mask is not None and 0 <= token < len(mask) and bool(mask[token])


def num_allowed(grammar: Grammar, tokens: Sequence[int]) -> int:
    """Returns how many of the first of a path's tokens are allowed."""
    refused = (at for at, token in enumerate(tokens) if not is_allowed(grammar, tokens[:at], token))
    return next(refused, len(tokens))


def chain_with_forced(
    grammar: Grammar | None, tokens: Sequence[int], confidences: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Returns deterministic drafts of a chain and their confidences: forced ones first, then the draft's `tokens`."""
    forced = list(grammar.forced()[: len(tokens)]) if grammar is not None else []
    num = len(forced)
    return [*forced, *tokens[num:]], [FORCED] * num + list(confidences[num:])


def force_candidates(grammar: Grammar, tokens: Ints, confidences: Floats) -> None:
    """Makes a forced token the only candidate of its depth, in place.

    `tokens` [depths, candidates] int64 are the same after every node of a depth; `confidences` have the same shape.
    """
    for depth, token in enumerate(grammar.forced()[: len(tokens)]):
        tokens[depth], confidences[depth] = NO_TOKEN, 0
        tokens[depth, 0], confidences[depth, 0] = token, FORCED


def paths_after(batch: Batch, trees: DraftTrees, nodes: Ints) -> Paths:
    """Returns paths to nodes [slots, scored], -1: none, of sequences with a grammar."""
    rows = list[list[list[int] | None]]()
    for slot, sequence in enumerate(batch.sequences):
        scored = nodes[slot].tolist() if sequence.grammar is not None else []
        held = trees.paths[slot]
        rows.append([trees.path(slot, node) if node >= 0 and held[node] > 0 else None for node in scored])
    return rows


def refuse(batch: Batch, paths: Paths, tokens: Ints, confidences: NDArray[Any]) -> NDArray[Any]:
    """Returns confidences [slots, scored, candidates] that are 0 for candidates that a grammar refuses."""
    made = np.array(confidences)
    for slot, (sequence, row) in enumerate(zip(batch.sequences, paths, strict=True)):
        for column, path in enumerate(row):
            mask = None if path is None else sequence.grammar.draft_mask(path)
            is_right = False if mask is None else _allowed(mask, tokens[slot, column])
            made[slot, column] = np.where(is_right, made[slot, column], 0)
    return made


def drafts_within(
    grammar: Grammar | None, tokens: Sequence[int], parents: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the drafts of a tree that the grammar allows, by index, and the parents of these.

    Args:
        parents: by draft, a candidate index: 0 is the root, i + 1 draft i. The result's count kept drafts alone.
    """
    if grammar is None:
        return range(len(tokens)), parents
    paths: dict[int, list[int]] = {0: []}
    chosen, at = list[int](), {0: 0}
    for draft, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        path = paths.get(parent)
        if path is not None and is_allowed(grammar, path, token):
            paths[draft + 1], at[draft + 1] = [*path, token], len(chosen) + 1
            chosen.append(draft)
    return chosen, [at[parents[draft]] for draft in chosen]


def tree_within(batch: Batch, tree: TokenTree) -> TokenTree:
    """Returns deterministic trees without the nodes that grammars refuse, and what follows these."""
    if not has_grammars(batch):
        return tree
    tokens_kept, parents_kept = list[list[int]](), list[list[int]]()
    for slot, sequence in enumerate(batch.sequences):
        (root, *tokens), (_, *parents) = tree.nodes_of(slot)
        chosen, links = drafts_within(sequence.grammar, tokens, parents)
        tokens_kept.append([root, *map(tokens.__getitem__, chosen)])
        parents_kept.append([-1, *links])
    return TokenTree.ragged(tokens_kept, parents_kept)


def drawn_chains_with_forced(batch: Batch, tree: TokenTree) -> TokenTree:
    """Returns drawn chains whose first tokens are the forced ones, each with its own distribution; the rest stays.

    `tree` are chains as one run of a graph gives them, not masked before they were drawn.
    """
    if not has_grammars(batch):
        return tree
    tokens, probs = tree.tokens.copy(), np.array(tree.draft_probs)
    for slot, sequence in enumerate(batch.sequences):
        forced = sequence.grammar.forced() if sequence.grammar is not None else ()
        for node, token in enumerate(forced[: int(tree.num_nodes[slot]) - 1], start=1):
            tokens[slot, node], probs[slot, node] = token, 0
            probs[slot, node, token] = 1
    return TokenTree.chain(tokens, tree.num_nodes, probs)


def chains_within(batch: Batch, tree: TokenTree, *, is_drawn: bool) -> TokenTree:
    """Returns chains without what grammars refuse; of drawn ones the first refused draft stays, see the module."""
    nums = tree.num_nodes.copy()
    for slot, sequence in enumerate(batch.sequences):
        if sequence.grammar is not None and (num := int(nums[slot]) - 1):
            nums[slot] = 1 + min(num, num_allowed(sequence.grammar, tree.tokens[slot, 1 : num + 1].tolist()) + is_drawn)
    if (nums == tree.num_nodes).all():
        return tree
    nodes, probs = int(nums.max()), tree.draft_probs
    return TokenTree.chain(tree.tokens[:, :nodes], nums, None if probs is None else probs[:, :nodes])
