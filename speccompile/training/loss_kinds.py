# SPDX-License-Identifier: Apache-2.0
"""What a draft's distribution is measured by: cross-entropy, or the probability that the draft is accepted.

A drawn draft is accepted with probability alpha = sum_x min(target_probs(x), draft_probs(x)). The losses (LK: arXiv
2602.23881):

    kl         -sum_x target_probs(x) log draft_probs(x), the KL divergence and a constant
    lk         -log alpha
    lk_hybrid  lambda KL + (1 - lambda) (1 - alpha), lambda = exp(-3 alpha) without a gradient of its own

Labels are the target's most probable tokens, scaled to one. What a draft vocabulary lacks counts as refused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

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
