# SPDX-License-Identifier: Apache-2.0
"""`speccompile::TopTokens` and `speccompile::NodeLaws` as torch ops, for heads that guess inside their graph."""

from __future__ import annotations

import torch

from speccompile.ops import guesses as twins


@torch.library.custom_op("speccompile::top_tokens", mutates_args=())
def top_tokens(logits: torch.Tensor, num_guesses: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens behind each node; see `speccompile.ops.guesses`.

    Args:
        logits: [batch, nodes, vocab] float32.
        num_guesses: tokens a node.

    Returns:
        guesses [batch, nodes, num_guesses] int64 and their probabilities, float32.
    """
    guesses, probs = twins.top_tokens(logits.detach().numpy(), num_guesses=num_guesses)
    return torch.from_numpy(guesses.copy()), torch.from_numpy(probs)


@top_tokens.register_fake
def _(logits, num_guesses):  # type: ignore[no-untyped-def]
    batch, nodes, _ = logits.shape
    return logits.new_empty(batch, nodes, num_guesses, dtype=torch.int64), logits.new_empty(batch, nodes, num_guesses)


@torch.library.custom_op("speccompile::node_laws", mutates_args=())
def node_laws(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The warped law behind each node; see `speccompile.ops.guesses`.

    Args:
        logits: [batch, nodes, vocab] float32.
        temperature: [batch] float32.
        top_k: [batch] int64.
        top_p: [batch] float32.

    Returns:
        [batch, nodes, vocab] float32; zeros where all slots are greedy.
    """
    (laws,) = twins.node_laws(*(t.detach().numpy() for t in (logits, temperature, top_k, top_p)))
    # Tracing needs one shape: the dummy law of a greedy batch is widened.
    return torch.from_numpy(laws).expand(-1, -1, logits.shape[2]).clone()


@node_laws.register_fake
def _(logits, temperature, top_k, top_p):  # type: ignore[no-untyped-def]
    return logits.new_empty(logits.shape)
