# SPDX-License-Identifier: Apache-2.0
"""`speccompile::SampleToken` as a torch op, for drafts that sample inside their graph."""

from __future__ import annotations

import torch

from speccompile.ops.sample_token import sample_token as twin


@torch.library.custom_op("speccompile::sample_token", mutates_args=())
def sample_token(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a draft's next token, confidence and distribution; see `speccompile.ops.sample_token.sample_token`."""
    arrays = [t.detach().numpy() for t in (logits, uniforms, temperature, top_k, top_p)]
    token, confidence, dist = (torch.from_numpy(a) for a in twin(*arrays))
    # Tracing needs one shape: the dummy distribution of a greedy batch is widened.
    return token, confidence, dist.expand(-1, logits.shape[2]).clone()


@sample_token.register_fake
def _(logits, uniforms, temperature, top_k, top_p):  # type: ignore[no-untyped-def]
    batch, _, vocab = logits.shape
    token = uniforms.new_empty(batch, dtype=torch.int64)
    return token, uniforms.new_empty(batch), uniforms.new_empty(batch, vocab)
