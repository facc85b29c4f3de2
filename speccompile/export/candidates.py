# SPDX-License-Identifier: Apache-2.0
"""`speccompile::TopTokens`, `NodeProbs` and `SampleToken` as torch ops, for drafts with them in their graph."""

from __future__ import annotations

import torch

from speccompile.ops import candidates as twins
from speccompile.ops.sample_token import sample_token as sample_token_twin


@torch.library.custom_op("speccompile::top_tokens", mutates_args=())
def top_tokens(logits: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the most probable tokens after each node; see `speccompile.ops.candidates.top_tokens`."""
    candidates, probs = twins.top_tokens(logits.detach().numpy(), num_candidates=num_candidates)
    return torch.from_numpy(candidates.copy()), torch.from_numpy(probs)


@top_tokens.register_fake
def _(logits, num_candidates):  # type: ignore[no-untyped-def]
    batch, nodes, _ = logits.shape
    return logits.new_empty(batch, nodes, num_candidates, dtype=torch.int64), logits.new_empty(
        batch, nodes, num_candidates
    )


@torch.library.custom_op("speccompile::node_probs", mutates_args=())
def node_probs(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Returns the warped distribution after each node; see `speccompile.ops.candidates.node_probs`."""
    (dists,) = twins.node_probs(*(t.detach().numpy() for t in (logits, temperature, top_k, top_p)))
    # Tracing needs one shape: the dummy distribution of a greedy batch is widened.
    return torch.from_numpy(dists).expand(-1, -1, logits.shape[2]).clone()


@node_probs.register_fake
def _(logits, temperature, top_k, top_p):  # type: ignore[no-untyped-def]
    return logits.new_empty(logits.shape)


@torch.library.custom_op("speccompile::sample_token", mutates_args=())
def sample_token(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a draft's next token, confidence and distribution; see `speccompile.ops.sample_token.sample_token`."""
    arrays = [t.detach().numpy() for t in (logits, uniforms, temperature, top_k, top_p)]
    token, confidence, dist = (torch.from_numpy(a) for a in sample_token_twin(*arrays))
    # Tracing needs one shape: the dummy distribution of a greedy batch is widened.
    return token, confidence, dist.expand(-1, logits.shape[2]).clone()


@sample_token.register_fake
def _(logits, uniforms, temperature, top_k, top_p):  # type: ignore[no-untyped-def]
    batch, _, vocab = logits.shape
    token = uniforms.new_empty(batch, dtype=torch.int64)
    return token, uniforms.new_empty(batch), uniforms.new_empty(batch, vocab)
