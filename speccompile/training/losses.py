# SPDX-License-Identifier: Apache-2.0
"""The loss of drafts against the target's distributions: the vocabulary projection and its gradient in one pass.

Logits are made for one block of rows at a time and turned into the gradient in place, as all would be gigabytes.
A drawn draft is accepted with probability alpha = sum_x min(target_probs(x), draft_probs(x)). The losses (LK: arXiv
2602.23881):

    kl         -sum_x target_probs(x) log draft_probs(x), the KL divergence and a constant
    lk         -log alpha
    lk_hybrid  lambda KL + (1 - lambda) (1 - alpha), lambda = exp(-3 alpha) without a gradient of its own

Labels are the target's most probable tokens, scaled to one. What a draft vocabulary lacks counts as refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from speccompile.training_contract import Drafted, TrainingBatch

KINDS = ("kl", "lk", "lk_hybrid")
_ETA = 3.0  # of lambda
_LEAST = 1e-30  # of alpha under the logarithm


class LossTerms(NamedTuple):
    """Losses of rows, and their gradients by logits: `on_draft` * draft_probs, plus `on_kept` at the label's tokens."""

    losses: torch.Tensor  # [rows]
    alphas: torch.Tensor  # [rows], the probability that a drawn draft is accepted
    on_draft: torch.Tensor  # [rows]
    on_kept: torch.Tensor  # [rows, kept]
    on_label: torch.Tensor  # [rows, kept], gradients by the label's probabilities


def loss_terms(kind: str, probs: torch.Tensor, log_draft: torch.Tensor) -> LossTerms:
    """Returns the losses of rows; gradients are written out, as logits of all tokens are not kept.

    d draft(x) / d logit(j) = draft(x) (1[x = j] - draft(j)); alpha grows with draft(x) where it is below the label.

    Args:
        probs: [rows, kept] float32, the label; a token that comes twice has 0 at all but one.
        log_draft: [rows, kept] float32, logarithms of the draft distribution at the label's tokens.
    """
    draft = log_draft.exp()
    rising = torch.where(draft < probs, draft, 0.0)
    alphas, share = torch.minimum(probs, draft).sum(-1), rising.sum(-1)
    cross = -(probs * log_draft).sum(-1)
    if kind == "kl":
        return LossTerms(cross, alphas, probs.sum(-1), -probs, -log_draft)
    is_least = (draft >= probs).float()  # where the label bounds alpha
    if kind == "lk":
        least = alphas.clamp(min=_LEAST)
        return LossTerms(-least.log(), alphas, share / least, -rising / least[:, None], -is_least / least[:, None])
    weight = (-_ETA * alphas).exp()
    losses = weight * (cross + torch.xlogy(probs, probs).sum(-1)) + (1 - weight) * (1 - alphas)
    on_draft = weight * probs.sum(-1) + (1 - weight) * share
    weight = weight[:, None]
    on_label = weight * (probs.clamp(min=_LEAST).log() + 1 - log_draft) - (1 - weight) * is_least
    return LossTerms(losses, alphas, on_draft, -weight * probs - (1 - weight) * rising, on_label)


def losses_by_autograd(kind: str, probs: torch.Tensor, log_draft: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the same losses and alphas [rows] for autograd, of few tokens whose `log_draft` sum up to one."""
    alphas = torch.minimum(probs, log_draft.exp()).sum(-1)
    cross = -(probs * log_draft).sum(-1)
    if kind == "kl":
        return cross, alphas
    if kind == "lk":
        return -alphas.clamp(min=_LEAST).log(), alphas
    weight = (-_ETA * alphas.detach()).exp()
    return weight * (cross + torch.xlogy(probs, probs).sum(-1)) + (1 - weight) * (1 - alphas), alphas


BLOCK_ROWS = {"cpu": 1024, "cuda": 8192}  # whose logits are in memory at once


class _DistributionLoss(torch.autograd.Function):
    """Sum over rows of weight * loss(probs, softmax(states @ projection^T)).

    With it each row's loss, acceptance probability, and `num` most probable tokens [rows, num], the best first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        projection: torch.Tensor,
        ids: torch.Tensor,
        probs: torch.Tensor,
        weights: torch.Tensor,
        options: LossOptions,
        num: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wants_states, wants_projection, _, wants_probs = ctx.needs_input_grad[:4]
        dtype = options.dtype
        cast = projection.to(dtype)
        losses, best = states.new_empty(len(states), dtype=torch.float32), ids.new_empty(len(states), num)
        alphas = torch.empty_like(losses)
        grad_states = torch.empty_like(states, dtype=torch.float32) if wants_states else None
        grad_projection = torch.zeros_like(projection, dtype=torch.float32) if wants_projection else None
        grad_probs = torch.empty_like(probs) if wants_probs else None
        size = BLOCK_ROWS[states.device.type]
        for first in range(0, len(states), size):
            part = slice(first, first + size)
            rows = states[part].to(dtype)
            logits = rows @ cast.T
            if num == 1:
                top, best[part, 0] = logits.max(-1)
            else:
                values, best[part] = logits.topk(num, -1)
                top = values[:, 0]
            kept = torch.gather(logits, 1, ids[part]).float()
            soft = logits.sub_(top[:, None]).exp_()
            total = soft.sum(-1, dtype=torch.float32)
            log_draft = kept - (total.log() + top.float())[:, None]
            losses[part], alphas[part], on_draft, on_kept, on_label = loss_terms(options.kind, probs[part], log_draft)
            if grad_probs is not None:
                grad_probs[part] = on_label * weights[part][:, None]
            if grad_states is None:
                continue
            grad = soft.mul_((on_draft * weights[part] / total).to(dtype)[:, None])
            grad.scatter_add_(1, ids[part], (on_kept * weights[part][:, None]).to(dtype))
            grad_states[part] = (grad @ cast).float()
            if grad_projection is not None:
                grad_projection += (grad.T @ rows).float()
        ctx.save_for_backward(grad_states, grad_projection, grad_probs)
        ctx.mark_non_differentiable(losses, alphas, best)
        return (losses * weights).sum(), losses, alphas, best

    @staticmethod
    def backward(ctx: Any, total: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        states, projection, probs = (None if grad is None else grad * total for grad in ctx.saved_tensors)
        return states, projection, None, probs, None, None, None


@dataclass(frozen=True)
class LossOptions:
    """Weights and arithmetic of the loss."""

    kl_share: float  # of the target's distribution in the label; the rest is the next token of the text
    decay: float  # weight of a draft position relative to the one before
    dtype: torch.dtype
    kind: str = "kl"
    is_chained: bool = False  # a draft's weight is also the probability that drawing accepts all drafts before it


@dataclass(frozen=True)
class Measures:
    """Sums over the rows of a batch, [positions] each, and over whole chains; sums of batches add up."""

    losses: torch.Tensor
    hits: torch.Tensor  # drafts that are the target's own greedy token
    tried: torch.Tensor
    kept: torch.Tensor  # chains whose first i + 1 drafts are all hits
    chains: torch.Tensor
    alphas: torch.Tensor  # probabilities that drafts are accepted where they are drawn at temperature 1
    reached: torch.Tensor  # probabilities that the first i + 1 drafts of a chain are all accepted

    def stacked(self) -> torch.Tensor:
        """Returns [7, positions] float64, the inverse of `Measures(*rows)`."""
        parts = (self.losses, self.hits, self.tried, self.kept, self.chains, self.alphas, self.reached)
        return torch.stack([part.double() for part in parts])


class TrainedModule(nn.Module):
    """A trainable and its loss as one module, so that a sharded model has one forward."""

    def __init__(self, trainable: Any, options: LossOptions, vocab_size: int) -> None:
        super().__init__()
        self.trainable, self.options, self.vocab_size = trainable, options, vocab_size

    def forward(self, batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss, and the measures as [7, positions] float64."""
        drafted: Drafted = self.trainable(batch)
        return judge(drafted, batch, self.options, self.vocab_size)


def judge(
    drafted: Drafted, batch: TrainingBatch, options: LossOptions, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of drafts, and its measures as [7, positions] float64."""
    rows, depth = drafted.labels.shape
    device = drafted.states.device
    decay = torch.tensor([options.decay**i for i in range(depth)], device=device)
    dists = _labels(batch, options.kl_share)
    total: torch.Tensor = drafted.states.new_zeros((), dtype=torch.float32)
    losses, alphas = (torch.zeros(rows, depth, device=device) for _ in range(2))
    hits = torch.zeros(rows, depth, dtype=torch.bool, device=device)
    greedy = batch.dist_tokens.flatten(0, 1)[:, 0]
    valid, num_chains = _valid(drafted.labels, batch.is_label)
    weights = (decay / num_chains / decay.sum()).expand(rows, depth)
    # Where a draft's weight is what those before it were accepted with, depths come one after the other.
    for group in [[i] for i in range(depth)] if options.is_chained else _groups(drafted.projections):
        chosen = valid[:, group].nonzero()  # [drafts, 2]
        row, column = chosen[:, 0], torch.tensor(group, device=device)[chosen[:, 1]]
        label = drafted.labels[row, column]
        ids, probs = dists[0][label], dists[1][label]
        if drafted.d2t is not None:
            ids, probs = _to_draft_vocab(drafted.d2t, ids, probs, vocab_size)
        at = (row, column)
        loss, each, alpha, token = _losses_of(drafted, group[0], at, (ids, probs), weights[at], options)
        total = total + loss
        losses[row, column], alphas[row, column] = each.detach(), alpha.detach()
        hits[row, column] = (token if drafted.d2t is None else drafted.d2t[token]) == greedy[label]
        if options.is_chained:
            weights = weights * torch.where(valid[:, group], alphas[:, group], 1.0)
    return total, _measure(losses, hits, alphas, valid).stacked()


def _losses_of(
    drafted: Drafted,
    depth: int,
    at: tuple[torch.Tensor, torch.Tensor],
    labels: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    options: LossOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the weighted sum of the losses of drafts of one projection; and each one's loss, acceptance, best token.

    Args:
        at: rows and depths of the drafts, [drafts] int64 each.
        labels: tokens of the draft vocabulary [drafts, kept] int64, and their probabilities.
        weights: [drafts].
    """
    (ids, probs), selection = labels, drafted.selection
    states, projection = drafted.states[at], drafted.projections[depth]
    num = 1 if selection is None else min(selection.num, len(projection))
    total, losses, alphas, best = _DistributionLoss.apply(states, projection, ids, probs, weights, options, num)
    if selection is None:
        return total, losses, alphas, best[:, 0]
    # A product would be rounded to bfloat16, whose steps at a logit of 20 are wider than most gaps.
    unary = (projection[best] * states[:, None]).sum(-1)
    scores = unary + selection.score(states, selection.before[at], best).float()
    # What is no candidate is left out of the label.
    wanted = ((best[:, :, None] == ids[:, None]) * probs[:, None]).sum(-1)
    of_candidates, alphas = losses_by_autograd(options.kind, wanted, scores.log_softmax(-1))
    chosen = torch.gather(best, 1, scores.argmax(-1, keepdim=True))[:, 0]
    return total + (of_candidates * weights).sum(), losses, alphas, chosen


def _valid(labels: torch.Tensor, is_label: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
    valid = labels >= 0
    if is_label is None:
        return valid, max(1, len(labels))
    is_learned = is_label.flatten()[labels.clamp(min=0)]
    # A chain that begins at a text's end has no label, and counts as one.
    return valid & is_learned, (is_learned | ~valid).any(-1).sum().clamp(min=1)


def _labels(batch: TrainingBatch, kl_share: float) -> tuple[torch.Tensor, torch.Tensor]:
    ids, probs = batch.dist_tokens.flatten(0, 1), batch.dist_probs.flatten(0, 1).float()
    probs = probs / probs.sum(-1, keepdim=True)
    if kl_share == 1.0:
        return ids, probs
    nodes = batch.tokens.shape[1]
    following = batch.tokens.roll(-1, 1).flatten()
    # No token follows the last one of a window: its label is the target's most probable token.
    is_last = torch.arange(nodes, device=ids.device).repeat(len(batch.tokens)) == nodes - 1
    following = torch.where(is_last, ids[:, 0], following)
    # The token is one of those that are known, or one more: none comes twice with a probability.
    is_known = ids == following[:, None]
    share = torch.where(is_known.any(1, keepdim=True), 0.0, torch.full_like(probs[:, :1], 1.0 - kl_share))
    probs = probs * kl_share + is_known * (1.0 - kl_share)
    return torch.cat((ids, following[:, None]), 1), torch.cat((probs, share), 1)


def _to_draft_vocab(
    d2t: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    t2d = torch.full((vocab_size,), -1, dtype=torch.int64, device=d2t.device)
    t2d[d2t] = torch.arange(len(d2t), device=d2t.device)
    mapped = t2d[ids]
    return mapped.clamp(min=0), probs * (mapped >= 0)


def _groups(projections: Sequence[torch.Tensor]) -> list[list[int]]:
    held: dict[int, list[int]] = {}
    for position, projection in enumerate(projections):
        held.setdefault(id(projection), []).append(position)
    return list(held.values())


def _measure(losses: torch.Tensor, hits: torch.Tensor, alphas: torch.Tensor, valid: torch.Tensor) -> Measures:
    whole = valid.all(-1, keepdim=True)
    kept, reached = (hits.long().cumprod(-1).bool() & whole).sum(0), (alphas.cumprod(-1) * whole).sum(0)
    sums = ((losses * valid).sum(0), (hits & valid).sum(0), valid.sum(0), kept, whole.expand_as(valid).sum(0))
    return Measures(*sums, (alphas * valid).sum(0), reached)
