# SPDX-License-Identifier: Apache-2.0
"""Domino's head in plain torch, written from the public description, path by path; see `dflash_lab`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

NESTED = {
    "projector_type": "domino", "emb_dim": 10, "gru_hidden_dim": 12, "pure_draft_prefix_len": 1, "shift_label": True,
}  # fmt: skip


def shapes(made: dict[str, Any], vocab: int) -> dict[str, tuple[tuple[int, int], float]]:
    """Returns shapes of the head's weights by key, and the scales to draw them with; none for another drafter."""
    own, hidden = made["dflash_config"], made["hidden_size"]
    if "gru_hidden_dim" not in own:
        return {}
    state, width = own["gru_hidden_dim"], own["emb_dim"]
    return {
        "prefix_gru.weight_ih_l0": ((3 * state, hidden), 0.3),
        "prefix_gru.weight_hh_l0": ((3 * state, state), 0.6),
        "embed_proj.0.weight": ((width, hidden + state), 0.8),
        "embed_proj.2.weight": ((vocab, width), 1.5),
    }


def scores_after(
    twin: Any, hidden: torch.Tensor, root: int, path: Sequence[int], candidates: torch.Tensor, base: torch.Tensor
) -> torch.Tensor:
    """Returns the scores of the candidates of the slot after a path.

    Args:
        twin: of the drafter, a `dflash_lab.Twin`.
        hidden: [drafts, hidden], what the LM head reads.
        root: its token.
        path: drafts after it.
        candidates: [drafts, candidates] int64.
        base: of the same shape, their logits.
    """
    slot, num_plain = len(path), twin.made["dflash_config"]["pure_draft_prefix_len"]
    if slot < (0 if "corrected" in twin.faults else num_plain):
        return base[slot]
    tokens = [root, *path]
    if "late" in twin.faults:  # the state without the last token
        tokens = tokens[:-1]
    into, over = twin.held["prefix_gru.weight_ih_l0"], twin.held["prefix_gru.weight_hh_l0"]
    state = torch.zeros(1, over.shape[1])
    for token in tokens:
        state = torch.gru_cell(twin.embeddings[token][None], state, into, over)
    both = (state[0], hidden[slot]) if "order" in twin.faults else (hidden[slot], state[0])
    inner = functional.silu(twin.linear(torch.cat(both), "embed_proj.0"))
    return base[slot] + twin.linear(inner, "embed_proj.2")[candidates[slot]]
