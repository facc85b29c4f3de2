# SPDX-License-Identifier: Apache-2.0
"""Medusa heads under training: every position of the text is a start."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from speccompile.core.training import Drafted, TrainingBatch
from speccompile.export.heads_file import write_heads
from speccompile.speculators.medusa.heads import MedusaHeads


class TrainableMedusa(nn.Module):
    """See `speccompile.core.training.Trainable`.

    Args:
        heads: the heads.
        lm_head: [vocab, hidden], the target's.
    """

    def __init__(self, heads: MedusaHeads, lm_head: torch.Tensor) -> None:
        super().__init__()
        self.heads, self.num_positions = heads, heads.sizes.num_heads
        self.register_buffer("lm_head", lm_head, persistent=False)

    def forward(self, batch: TrainingBatch) -> Drafted:
        """Head i imitates the law behind the token i + 1 places further on."""
        states = self.heads.states(batch.hidden).flatten(0, 1)
        count, nodes = batch.tokens.shape
        start = torch.arange(count * nodes, device=states.device)[:, None]
        ahead = 1 + torch.arange(self.num_positions, device=states.device)
        labels = torch.where(start % nodes + ahead < nodes, start + ahead, -1)
        return Drafted(states, labels, self.heads.projections(self.lm_head))

    @torch.no_grad()
    def draft(self, batch: TrainingBatch, num: int) -> torch.Tensor:
        """The best token of each head."""
        return self.heads(batch.hidden[:, -1], self.lm_head)[0, :num].argmax(-1)

    def save(self, folder: Path) -> None:
        """The published layout of Medusa v1 in safetensors."""
        write_heads(folder, self.heads.sizes.config_from_sizes(), self.heads.state_dict())
