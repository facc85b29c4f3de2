# SPDX-License-Identifier: Apache-2.0
"""An early-exit head under training, on the residual stream that the target's first layers leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speccompile.checkpoints.model_config import read_whole_config
from speccompile.errors import RecipeError
from speccompile.export.chains import cut_chains
from speccompile.export.heads_file import read_heads, write_heads
from speccompile.export.weights import read_weights
from speccompile.speculators.early_exit.config import ExitTraining
from speccompile.speculators.early_exit.model import ExitHead, ExitSizes
from speccompile.training_contract import Drafted, TargetNeeds, TargetParts, TrainingBatch


class TrainableExit(nn.Module):
    """A `Trainable` in which every token is drafted from its own stream, whatever its distance from the root."""

    def __init__(self, head: ExitHead, parts: TargetParts, chain: int) -> None:
        super().__init__()
        self.head, self.num_positions, self.folder = head, chain, parts.folder
        self.register_buffer("lm_head", parts.lm_head, persistent=False)
        self._first_layers: list[Any] = []  # in a list: its weights are not this module's

    def forward(self, batch: TrainingBatch) -> Drafted:
        """Returns the drafts; the stream at a token imitates the distribution after it."""
        states = self.head(batch.layers[self.head.sizes.num_exit_layers - 1].float())
        return Drafted(*cut_chains(batch.tokens, states, self.num_positions), (self.lm_head,) * self.num_positions)

    @torch.no_grad()
    def draft(self, batch: TrainingBatch, num: int) -> torch.Tensor:
        """Returns a chain; the target's first layers read the whole text again for each draft."""
        if not self._first_layers:
            config = read_whole_config(self.folder)
            config.num_hidden_layers = self.head.sizes.num_exit_layers
            model, _ = read_weights(self.folder, config)
            model.base_model.norm = nn.Identity()
            self._first_layers.append(model.base_model.eval().to(batch.tokens.device))
        tokens = batch.tokens
        for _ in range(num):
            stream = self._first_layers[0](input_ids=tokens, use_cache=False).last_hidden_state[:, -1]
            token = (self.head(stream) @ self.lm_head.T).argmax(-1)
            tokens = torch.cat((tokens, token[:, None]), 1)
        return tokens[0, -num:]

    def save(self, folder: Path) -> None:
        """Writes our layout: config.json with `ExitSizes`, parameters under their names here."""
        write_heads(folder, self.head.sizes.config_from_sizes(), self.head.state_dict())


class EarlyExitTrainer:
    """A `speccompile.training_contract.Trainer`."""

    def needs(self, config: ExitTraining, target: Mapping[str, Any]) -> TargetNeeds:
        """Returns the needs: the stream after the last layer that runs."""
        num_layers = int(target["num_hidden_layers"])
        if config.num_exit_layers >= num_layers:
            got, expected = f"{config.num_exit_layers}", f"less than the target's {num_layers}"
            raise RecipeError("training.heads.num_exit_layers", got, expected, "Lower it.")
        return TargetNeeds(layers=(config.num_exit_layers - 1,))

    def make(self, config: ExitTraining, parts: TargetParts, start: Path | None) -> Any:
        """Returns an adapter that changes little with the target's final norm, or `start`."""
        vocab, hidden = parts.lm_head.shape
        inner = config.intermediate_size or int(parts.config.get("intermediate_size") or 4 * hidden)
        eps = float(parts.config.get("rms_norm_eps", 1e-5))
        head = ExitHead(ExitSizes(hidden, vocab, config.num_exit_layers, inner, eps))
        if parts.norm is not None:
            head.norm.weight.data.copy_(parts.norm)
        if start is not None:
            head.load_state_dict(read_heads(start, head.state_dict()))
        return TrainableExit(head, parts, config.chain)
