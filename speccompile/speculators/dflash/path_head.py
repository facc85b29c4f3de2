# SPDX-License-Identifier: Apache-2.0
"""Domino's head: a recurrent state over a path's drafts, which corrects the scores of the slot after it.

Published as state = GRU(embedding of the path's last token, state before it), delta = W2 SiLU(W1 [slot's state of the
drafter, state of the path]) (arXiv 2605.29707). A block computes what depends on no path: embeddings, the first part of
W1's product and the candidates' rows of W2. The step does the rest for one token of a path.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from speccompile.export.feature_draft import fill_weights
from speccompile.speculators.dflash.drafter import PathHead

_GRU, _INNER, _OUTER = "prefix_gru.weight_{}h_l0", "embed_proj.0.weight", "embed_proj.2.weight"


class PathTerms(nn.Module):
    """What a block gives of the head."""

    def __init__(self, hidden: int, vocab: int, head: PathHead) -> None:
        super().__init__()
        self.num_plain = head.num_plain
        self.inner = nn.Linear(hidden, head.width, bias=False)
        self.rows = nn.Embedding(vocab, head.width)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `slot_terms` and `candidate_rows` of slots [batch, slots, hidden] and candidates; see `blocks`."""
        is_corrected = (torch.arange(tokens.shape[1]) >= self.num_plain)[:, None, None]
        return self.inner(hidden), self.rows(tokens) * is_corrected


class PathStep(nn.Module):
    """The module of the step: inputs as in `path_step_spec`, as one list."""

    def __init__(self, hidden: int, head: PathHead) -> None:
        super().__init__()
        self.token_gates = nn.Linear(hidden, 3 * head.state_size, bias=False)
        self.state_gates = nn.Linear(head.state_size, 3 * head.state_size, bias=False)
        self.inner = nn.Linear(head.state_size, head.width, bias=False)

    def forward(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the states after each node, and the scores of the candidates that follow."""
        embedded, states, terms, rows, base = tensors
        reset, update, fresh = self.token_gates(embedded).chunk(3, -1)
        old_reset, old_update, old_fresh = self.state_gates(states).chunk(3, -1)
        kept = (update + old_update).sigmoid()
        made = (fresh + (reset + old_reset).sigmoid() * old_fresh).tanh()
        following = (1 - kept) * made + kept * states
        inner = functional.silu(terms[:, None] + self.inner(following))
        return following, base[:, None] + inner @ rows.transpose(1, 2)


def block_weights(weights: Mapping[str, torch.Tensor], hidden: int, name: str) -> dict[str, torch.Tensor]:
    """Returns the weights of `PathTerms` by names after `name`, of a checkpoint in the canonical layout."""
    return {f"{name}.inner.weight": weights[_INNER][:, :hidden].contiguous(), f"{name}.rows.weight": weights[_OUTER]}


def make_step(head: PathHead, hidden: int, weights: Mapping[str, torch.Tensor] | None) -> PathStep:
    """Returns the step with its weights. `weights`: by the names of the canonical layout; None: random ones."""
    own = None
    if weights is not None:
        gates = (("token_gates", "i"), ("state_gates", "h"))
        own = {f"{name}.weight": weights[_GRU.format(side)] for name, side in gates}
        own["inner.weight"] = weights[_INNER][:, hidden:].contiguous()
    with torch.device("meta"):
        step = PathStep(hidden, head)
    fill_weights(step, own)
    return step.eval()


def most_probable_path(
    step: PathStep,
    embedded: torch.Tensor,
    terms: torch.Tensor,
    rows: torch.Tensor,
    candidates: torch.Tensor,
    base: torch.Tensor,
) -> torch.Tensor:
    """Returns the tokens of the most probable walk over a block, [batch, slots].

    `candidates` are [batch, slots, candidates] int64, `base` their scores without the head.
    """
    batch, slots, num = candidates.shape
    each, columns = torch.arange(batch), torch.zeros(batch, dtype=torch.int64)
    state, tokens = embedded.new_zeros(batch, 1, step.state_gates.in_features), []
    for slot in range(slots):
        state, scores = step([embedded[each, columns][:, None], state, terms[:, slot], rows[:, slot], base[:, slot]])
        taken = scores[:, 0].argmax(-1)
        tokens.append(candidates[each, slot, taken])
        columns = 1 + slot * num + taken
    return torch.stack(tokens, 1)
