# SPDX-License-Identifier: Apache-2.0
"""A Prophet transformer under training: drawn positions are starts of short sequences of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speccompile.errors import RecipeError
from speccompile.export.chains import drawn_positions
from speccompile.export.heads_file import read_heads, write_heads
from speccompile.export.layers import copy_weights
from speccompile.speculators.prophet.config import ProphetSizes, ProphetTraining
from speccompile.speculators.prophet.model import Prophet
from speccompile.training_contract import Drafted, TargetNeeds, TargetParts, TrainingBatch


class TrainableProphet(nn.Module):
    """A `speccompile.training_contract.Trainable`. `parts`: the target's embeddings and LM head."""

    def __init__(self, heads: Prophet, parts: TargetParts, starts: float) -> None:
        super().__init__()
        self.heads, self.starts, self.num_positions = heads, starts, heads.sizes.horizon
        self.register_buffer("embeddings", parts.embeddings, persistent=False)
        self.register_buffer("lm_head", parts.lm_head, persistent=False)

    def forward(self, batch: TrainingBatch) -> Drafted:
        """Returns the drafts; a start at t reads the state there and tokens t + 1 .., imitates their distributions."""
        count, nodes = batch.tokens.shape
        num = count * (nodes - 1)
        wanted = None if batch.is_label is None else batch.is_label[:, 1:].reshape(1, num)
        [drawn] = drawn_positions(batch.tokens[:1], num, round(num * self.starts), batch.seed, wanted)
        row, position = drawn // (nodes - 1), drawn % (nodes - 1)
        ahead = position[:, None] + 1 + torch.arange(self.num_positions, device=position.device)
        tokens = batch.tokens[row[:, None], ahead.clamp(max=nodes - 1)]
        states = self.heads(batch.hidden[row, position].float(), self.embeddings[tokens])
        labels = torch.where(ahead < nodes, row[:, None] * nodes + ahead, -1)
        return Drafted(states, labels, (self.lm_head,) * self.num_positions)

    @torch.no_grad()
    def draft(self, batch: TrainingBatch, num: int) -> torch.Tensor:
        """Returns a chain, drafted token by token."""
        past, token, drafted = self.heads.begin(batch.hidden[:, -1].float()), batch.tokens[0, -1], []
        for index in range(num):
            state, past = self.heads.step(index, self.embeddings[token][None, None], past)
            token = (state @ self.lm_head.T).argmax(-1)[0]
            drafted.append(token)
        return torch.stack(drafted)

    def save(self, folder: Path) -> None:
        """Writes our layout: config.json with `ProphetSizes`, parameters under their names here."""
        write_heads(folder, self.heads.sizes.config_from_sizes(), self.heads.state_dict())


def begin_prophet(sizes: ProphetSizes, parts: TargetParts) -> Prophet:
    """Returns a transformer that begins as the target's last layers, where the sizes are theirs."""
    heads = Prophet(sizes)
    with torch.no_grad():
        if sizes.hidden_size == sizes.target_hidden_size:
            torch.nn.init.eye_(heads.input_proj.weight)
        if parts.norm is not None and parts.norm.shape == heads.norm.weight.shape:
            heads.norm.weight.copy_(parts.norm)
    for layer, weights in zip(heads.layers, parts.layers[-len(heads.layers) :], strict=False):
        copy_weights(layer, weights)
    return heads


class ProphetTrainer:
    """A `speccompile.training_contract.Trainer`."""

    def needs(self, config: ProphetTraining, target: Mapping[str, Any]) -> TargetNeeds:
        return TargetNeeds(hidden=True)

    def make(self, config: ProphetTraining, parts: TargetParts, start: Path | None) -> Any:
        """Returns the target's last layers, if sizes allow, between its embeddings and its LM head; or `start`."""
        vocab, hidden = parts.lm_head.shape
        if hidden % config.num_heads or hidden // config.num_heads % 2:
            expected = f"a divisor of the target's hidden size {hidden} that leaves an even head size"
            raise RecipeError("training.heads.num_heads", f"{config.num_heads}", expected, "Correct the recipe.")
        sizes = ProphetSizes(
            vocab_size=vocab,
            target_hidden_size=hidden,
            hidden_size=hidden,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=hidden // config.num_heads,
            horizon=config.horizon,
        )
        heads = begin_prophet(sizes, parts)
        if start is not None:
            heads.load_state_dict(read_heads(start, heads.state_dict()))
        return TrainableProphet(heads, parts, config.starts)
