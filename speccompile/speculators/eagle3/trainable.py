# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 drafter under training: the first draft at every position, further ones on its own features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from speccompile.core.training import Drafted, TargetParts, TrainingBatch
from speccompile.export.heads_file import write_heads
from speccompile.export.layers import take_over
from speccompile.speculators.eagle3.heads import EagleHeads, EagleSizes, Rows


class TrainableEagle3(nn.Module):
    """See `speccompile.core.training.Trainable`.

    A drafter that only ever saw the target's features drafts one token well and then none: it is unrolled in
    training as it is at drafting time ("training-time test" of the paper).

    Args:
        heads: the drafter.
        parts: the target's embeddings.
        steps: drafts of a chain.
        starts: share of positions from which whole chains are unrolled.
    """

    def __init__(self, heads: EagleHeads, parts: TargetParts, steps: int, starts: float) -> None:
        super().__init__()
        self.heads, self.num_positions, self.starts = heads, steps, starts
        self.register_buffer("embeddings", parts.embeddings, persistent=False)

    def forward(self, batch: TrainingBatch) -> Drafted:
        """A chain that starts at position t reads features up to t and tokens up to t + 1, the root."""
        count, nodes = batch.tokens.shape
        features = self.heads.fuse([batch.layers[i][:, :-1].float() for i in self.heads.sizes.layers])
        device = batch.tokens.device
        positions = torch.arange(nodes - 1, device=device)[None]
        embedded = self.embeddings[batch.tokens[:, 1:]]
        mask = torch.ones(nodes - 1, nodes - 1, dtype=torch.bool, device=device).tril()
        features, context = self.heads.read(embedded, features, positions, None, mask)
        generator = torch.Generator().manual_seed(batch.seed % 2**31)
        num = max(1, round((nodes - 1) * self.starts))
        places = torch.stack([torch.randperm(nodes - 1, generator=generator)[:num] for _ in range(count)]).to(device)
        feature = torch.gather(features, 1, places[..., None].expand(-1, -1, features.shape[-1]))
        states = [feature]
        chains: list[Rows] = []
        for step in range(1, self.num_positions):
            tokens = torch.gather(batch.tokens, 1, (places + 1 + step).clamp(max=nodes - 1))
            feature, drafted = self.heads.extend(self.embeddings[tokens], feature, places, context, chains)
            chains.append(drafted)
            states.append(feature)
        ahead = places[..., None] + 1 + torch.arange(self.num_positions, device=device)
        rows = torch.arange(count, device=device)[:, None, None]
        labels = torch.where(ahead < nodes, rows * nodes + ahead, -1)
        states = self.heads.norm(torch.stack(states, 2))
        projections = (self.heads.lm_head.weight,) * self.num_positions
        return Drafted(states.flatten(0, 1), labels.flatten(0, 1), projections, self.heads.target_tokens())

    @torch.no_grad()
    def draft(self, batch: TrainingBatch, num: int) -> torch.Tensor:
        """Read all features, then draft on own ones with a growing cache."""
        features = self.heads.fuse([batch.layers[i].float() for i in self.heads.sizes.layers])
        nodes = features.shape[1]
        mask = torch.ones(nodes, nodes, dtype=torch.bool).tril()
        embedded = self.embeddings[batch.tokens[:, 1:]]
        features, held = self.heads.read(embedded, features, torch.arange(nodes)[None], None, mask)
        feature, drafted, d2t = features[:, -1:], [], self.heads.target_tokens()
        for step in range(num):
            token = self.heads.lm_head(self.heads.norm(feature)).argmax(-1)
            token = token if d2t is None else d2t[token]
            drafted.append(token[0, 0])
            if step + 1 < num:
                position = torch.full((1, 1), nodes + step)
                feature, held = self.heads.read(self.embeddings[token], feature, position, held, None)
        return torch.stack(drafted)

    def save(self, folder: Path) -> None:
        """The layout of the first release; the embeddings are the target's and left out."""
        write_heads(folder, config_from_sizes(self.heads.sizes), self.heads.state_dict())


def config_from_sizes(sizes: EagleSizes) -> dict[str, Any]:
    """The config.json of a drafter of these sizes."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": sizes.hidden_size,
        "target_hidden_size": sizes.target_hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
        "vocab_size": sizes.vocab_size,
        "draft_vocab_size": sizes.draft_vocab_size,
        "tie_word_embeddings": False,
        "norm_before_residual": sizes.norm_before_residual,
        # The published ids count states in front of layers: layer i's output is the state in front of i + 1.
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in sizes.layers],
    }


def begin_heads(sizes: EagleSizes, parts: TargetParts) -> EagleHeads:
    """The feature is the last stream, the MLP and the norm are the target's last ones, the LM head is a part of its."""
    heads = EagleHeads(sizes)
    hidden = sizes.target_hidden_size
    with torch.no_grad():
        heads.fc.weight.zero_()
        heads.fc.weight[:, -hidden:] = torch.eye(sizes.hidden_size, hidden)
        if parts.norm is not None and parts.norm.shape == heads.norm.weight.shape:
            heads.norm.weight.copy_(parts.norm)
        if parts.layers:
            take_over(heads.midlayer, parts.layers[-1])
        chosen = torch.arange(sizes.vocab_size)
        if sizes.draft_vocab_size != sizes.vocab_size:
            chosen = parts.token_counts.argsort(descending=True, stable=True)[: sizes.draft_vocab_size].sort().values
            heads.d2t.copy_(chosen - torch.arange(len(chosen)))
            heads.t2d[chosen] = True
        heads.lm_head.weight.copy_(parts.lm_head[chosen])
    return heads
