# SPDX-License-Identifier: Apache-2.0
"""Medusa heads under training: every position of the text is a start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speccompile.export.heads_file import read_heads, write_heads
from speccompile.speculators.medusa.config import HeadsSizes, MedusaTraining
from speccompile.speculators.medusa.model import MedusaHeads
from speccompile.training_contract import Drafted, TargetNeeds, TargetParts, TrainingBatch


class TrainableMedusa(nn.Module):
    """A `speccompile.training_contract.Trainable`. `lm_head`: [vocab, hidden], the target's."""

    def __init__(self, heads: MedusaHeads, lm_head: torch.Tensor) -> None:
        super().__init__()
        self.heads, self.num_positions = heads, heads.sizes.num_heads
        self.register_buffer("lm_head", lm_head, persistent=False)

    def forward(self, batch: TrainingBatch) -> Drafted:
        """Returns the heads' drafts; head i imitates the distribution after the token i + 1 positions on."""
        states = torch.stack(self.heads.states(batch.hidden), -2).flatten(0, 1)
        count, nodes = batch.tokens.shape
        start = torch.arange(count * nodes, device=states.device)[:, None]
        ahead = 1 + torch.arange(self.num_positions, device=states.device)
        labels = torch.where(start % nodes + ahead < nodes, start + ahead, -1)
        return Drafted(states, labels, self.heads.projections(self.lm_head))

    @torch.no_grad()
    def draft(self, batch: TrainingBatch, num: int) -> torch.Tensor:
        return self.heads(batch.hidden[:, -1], self.lm_head)[0, :num].argmax(-1)

    def save(self, folder: Path) -> None:
        """Writes the published layout of Medusa v1 in safetensors."""
        write_heads(folder, self.heads.sizes.config(), self.heads.state_dict())


class MedusaTrainer:
    """A `speccompile.training_contract.Trainer`."""

    def needs(self, config: MedusaTraining, target: Mapping[str, Any]) -> TargetNeeds:
        return TargetNeeds(hidden=True)

    def make(self, config: MedusaTraining, parts: TargetParts, start: Path | None) -> Any:
        """Returns heads whose blocks change nothing at first, with LM heads as the target's; or `start`."""
        vocab, hidden = parts.lm_head.shape
        heads = MedusaHeads(HeadsSizes(hidden, vocab, config.num_heads, config.num_layers, config.lm_head == "target"))
        for name, parameter in heads.named_parameters():
            parameter.data.zero_()
            if parameter.shape[0] == vocab and name.endswith(f"{config.num_layers}.weight"):
                parameter.data.copy_(parts.lm_head)
        if start is not None:
            heads.load_state_dict(read_heads(start, heads.state_dict()))
        return TrainableMedusa(heads, parts.lm_head)
