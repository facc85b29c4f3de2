# SPDX-License-Identifier: Apache-2.0
"""A GLIDE drafter under training: the text in blocks, as drafting goes through it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speccompile.export.heads_file import read_heads, write_heads
from speccompile.export.layers import copy_weights
from speccompile.speculators.glide.config import GlideDims, GlideTraining
from speccompile.speculators.glide.model import Glide, WholeText
from speccompile.training_contract import Drafted, TargetNeeds, TargetParts, TrainingBatch


class TrainableGlide(nn.Module):
    """A `speccompile.training_contract.Trainable`."""

    def __init__(self, drafter: Glide, block: int) -> None:
        super().__init__()
        self.drafter, self.num_positions = drafter, block

    def forward(self, batch: TrainingBatch) -> Drafted:
        """Returns drafts of blocks of `block` tokens, the first of each its root; their offset is drawn by sequence.

        A token in a block sees the target's rows before its block, as in drafting, and the drafter's up to itself.
        """
        count, nodes = batch.tokens.shape
        generator = torch.Generator().manual_seed(batch.seed % 2**31)
        device = batch.tokens.device
        shift = torch.randint(self.num_positions, (count, 1), generator=generator, device="cpu").to(device)
        positions = torch.arange(nodes, device=device)[None]
        depth = (positions + shift) % self.num_positions  # [batch, nodes], 0 at roots
        roots = positions - depth
        sees = positions[:, None, :] < roots[:, :, None]  # [batch, nodes, target rows]
        # No rows come before the first block: its tokens see one row, and are no starts.
        sees[..., 0] = True
        causal = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()
        target = (batch.k_cache.float(), batch.v_cache.float())
        text = WholeText(self.drafter.sizes, positions, target, sees[:, None], mask=causal)
        states = self.drafter(batch.tokens, text)
        return self._by_blocks(states, roots)

    def _by_blocks(self, states: torch.Tensor, roots: torch.Tensor) -> Drafted:
        _, nodes, width = states.shape
        is_root = (roots == torch.arange(nodes, device=roots.device)) & (roots > 0)
        row, root = is_root.nonzero().T
        ahead = root[:, None] + torch.arange(self.num_positions, device=roots.device)
        flat = row[:, None] * nodes + ahead.clamp(max=nodes - 1)
        labels = torch.where(ahead < nodes, flat, -1)
        projections = (self.drafter.model.embed_tokens.weight,) * self.num_positions
        return Drafted(states.reshape(-1, width)[flat], labels, projections)

    @torch.no_grad()
    def draft(self, batch: TrainingBatch, num: int) -> torch.Tensor:
        """Returns a chain: reads each token of the text as a block's first, then drafts with a growing cache."""
        nodes, device = batch.tokens.shape[1], batch.tokens.device
        positions = torch.arange(nodes, device=device)[None]
        target = (batch.k_cache.float(), batch.v_cache.float())
        sees = positions[:, None, : nodes - 1] < positions[:, :, None]
        sees[..., 0] = True
        causal = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()
        sizes = self.drafter.sizes
        text = WholeText(sizes, positions, target, sees[:, None], mask=causal)
        states = self.drafter(batch.tokens, text)
        drafted, state = [], states[:, -1]
        for step in range(num):
            token = (state @ self.drafter.model.embed_tokens.weight.T).argmax(-1)
            drafted.append(token[0])
            if step + 1 < num:
                text = WholeText(sizes, torch.full((1, 1), nodes + step, device=device), target, past=text.rows)
                state = self.drafter(token[:, None], text)[:, -1]
        return torch.stack(drafted)

    def save(self, folder: Path) -> None:
        write_heads(folder, self.drafter.sizes.config(), self.drafter.state_dict())


def begin_drafter(sizes: GlideDims, parts: TargetParts) -> Glide:
    """Returns a drafter with the target's embeddings, norm and last layers, whose attention both attentions copy."""
    drafter = Glide(sizes)
    with torch.no_grad():
        if parts.lm_head.shape == drafter.model.embed_tokens.weight.shape:
            drafter.model.embed_tokens.weight.copy_(parts.lm_head)
        if parts.norm is not None and parts.norm.shape == drafter.model.norm.weight.shape:
            drafter.model.norm.weight.copy_(parts.norm)
    for layer, weights in zip(drafter.model.layers, parts.layers[-len(drafter.model.layers) :], strict=False):
        copy_weights(layer, weights)
        copy_weights(layer.cross_attn, {k.removeprefix("self_attn."): v for k, v in parts.layers[-1].items()})
    if parts.layers:
        copy_weights(drafter.model.layers[0].self_attn, {
            k.removeprefix("self_attn."): v for k, v in parts.layers[0].items()
        })  # fmt: skip
        copy_weights(drafter.model.layers[0].input_layernorm, {"weight": parts.layers[0]["input_layernorm.weight"]})
    return drafter


class GlideTrainer:
    """A `speccompile.training_contract.Trainer`."""

    def needs(self, config: GlideTraining, target: Mapping[str, Any]) -> TargetNeeds:
        return TargetNeeds(caches=True)

    def make(self, config: GlideTraining, parts: TargetParts, start: Path | None) -> Any:
        """Returns a drafter with the target's embeddings and last layers, or `start`."""
        vocab, hidden = parts.lm_head.shape
        target = parts.config
        heads = int(target["num_attention_heads"])
        kv_heads = int(target.get("num_key_value_heads") or heads)
        head_dim = int(target.get("head_dim") or hidden // heads)
        theta = float((target.get("rope_parameters") or target).get("rope_theta", 10000.0))
        sizes = GlideDims(
            model_type="glide",
            max_positions=0,
            hidden_size=hidden,
            intermediate_size=config.intermediate_size or int(target.get("intermediate_size") or 4 * hidden),
            num_layers=config.num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            target_hidden_size=hidden,
            target_heads=heads,
            target_kv_heads=kv_heads,
            target_head_dim=head_dim,
            rms_norm_eps=float(target.get("rms_norm_eps", 1e-5)),
            rope_theta=theta,
            target_rope_theta=theta,
        )
        drafter = begin_drafter(sizes, parts)
        if start is not None:
            drafter.load_state_dict(read_heads(start, drafter.state_dict()))
        return TrainableGlide(drafter, config.block)
