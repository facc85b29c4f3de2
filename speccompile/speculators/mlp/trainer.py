# SPDX-License-Identifier: Apache-2.0
"""An MLP speculator under training: every position of the text is a start, heads read the text's own tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speccompile.export.heads_file import read_heads, write_heads
from speccompile.speculators.mlp.checkpoint import PREFIX
from speccompile.speculators.mlp.config import MODEL_TYPE, HeadsSizes, MlpTraining
from speccompile.speculators.mlp.model import MlpHeads, make_heads
from speccompile.training_contract import Drafted, TargetNeeds, TargetParts, TrainingBatch


class TrainableMlp(nn.Module):
    """A `speccompile.training_contract.Trainable`."""

    def __init__(self, heads: MlpHeads) -> None:
        super().__init__()
        self.heads, self.num_positions = heads.requires_grad_().train(), heads.sizes.num_heads

    def forward(self, batch: TrainingBatch) -> Drafted:
        """Returns the drafts; head i reads the token i + 1 after the start and imitates the distribution after it."""
        count, nodes = batch.tokens.shape
        starts = nodes - 1  # the last position has no root
        state, states, labels = self.heads.begin(batch.hidden[:, :starts].float()), [], []
        rows = torch.arange(count, device=batch.tokens.device)[:, None]
        positions = torch.arange(starts, device=batch.tokens.device)
        for i in range(self.num_positions):
            ahead = positions + 1 + i
            state = self.heads.advance(i, state, batch.tokens[:, ahead.clamp(max=nodes - 1)])
            states.append(state)
            flat = rows * nodes + ahead
            labels.append(torch.where(ahead < nodes, flat, -1))
        projections = tuple(self.heads.head[i].weight for i in range(self.num_positions))
        return Drafted(torch.stack(states, 2).flatten(0, 1), torch.stack(labels, 2).flatten(0, 1), projections)

    @torch.no_grad()
    def draft(self, batch: TrainingBatch, num: int) -> torch.Tensor:
        """Returns a chain; each head reads the token of the one before."""
        state, token, drafted = self.heads.begin(batch.hidden[:, -1:].float()), batch.tokens[:, -1:], []
        for i in range(num):
            state, logits = self.heads.step(i, state, token)
            token = logits.argmax(-1)
            drafted.append(token[0, 0])
        return torch.stack(drafted)

    def save(self, folder: Path) -> None:
        """Writes the published layout; a tied speculator holds the first copy of what is shared."""
        sizes = self.heads.sizes
        tensors = {PREFIX + name: tensor for name, tensor in self.heads.named_parameters()}
        write_heads(folder, config_from_sizes(sizes), tensors)


def config_from_sizes(sizes: HeadsSizes) -> dict[str, Any]:
    """Returns the config.json of a speculator of these sizes."""
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "vocab_size": sizes.vocab_size,
        "emb_dim": sizes.hidden_size,
        "inner_dim": sizes.inner_size,
        "n_predict": sizes.num_heads,
        "top_k_tokens_per_head": [max(1, 5 - i) for i in range(sizes.num_heads)],
        "n_candidates": 5,
        "tie_weights": sizes.is_tied,
        "scale_input": sizes.scales_input,
    }


def begin_heads(sizes: HeadsSizes, parts: TargetParts) -> MlpHeads:
    """Returns heads with the target's embeddings and LM heads, cut to the LM head's leading directions."""
    heads = make_heads(sizes)
    _, _, directions = torch.linalg.svd(parts.lm_head, full_matrices=False)
    basis = directions[: sizes.inner_size].T  # [hidden, inner]
    width = min(sizes.inner_size, basis.shape[1])
    with torch.no_grad():
        for i in range(sizes.num_heads):
            for weight, source in ((heads.emb[i].weight, parts.embeddings), (heads.head[i].weight, parts.lm_head)):
                weight.zero_()
                weight[:, :width] = source @ basis
    return heads


def load_heads(sizes: HeadsSizes, folder: Path) -> MlpHeads:
    heads = make_heads(sizes)
    tensors = read_heads(folder, {PREFIX + name: tensor for name, tensor in heads.named_parameters()})
    return make_heads(sizes, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()})


class MlpTrainer:
    """A `speccompile.training_contract.Trainer`."""

    def needs(self, config: MlpTraining, target: Mapping[str, Any]) -> TargetNeeds:
        return TargetNeeds(hidden=True)

    def make(self, config: MlpTraining, parts: TargetParts, start: Path | None) -> Any:
        """Returns heads with the target's embeddings and LM heads in `inner_size` directions, or `start`."""
        vocab, hidden = parts.lm_head.shape
        inner = config.inner_size or hidden
        sizes = HeadsSizes(
            MODEL_TYPE, vocab, hidden, inner, config.num_heads, config.num_heads, config.tie_weights, config.scale_input
        )
        heads = begin_heads(sizes, parts) if start is None else load_heads(sizes, start)
        return TrainableMlp(heads)
