# SPDX-License-Identifier: Apache-2.0
"""A block drafter under training: DFlash, and DFlash 2 with its convolutions and candidate selector.

Blocks of masks are filled from drawn roots in a text. They share the keys and values of its context, features of the
target's streams at the positions before each root; no block sees another. Slots are trained on the target's
distributions, DFlash 2's pair scores over each slot's candidates. `model.py` has the layers over caches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from speccompile.errors import RecipeError
from speccompile.export.chains import drawn_positions, labels_of
from speccompile.export.feature_draft import layer_config
from speccompile.export.feature_source import dims_from_config
from speccompile.export.heads_file import CONFIG, read_heads, write_heads
from speccompile.export.layers import copy_weights, init_linear, join_heads, split_heads
from speccompile.speculators.dflash.config import DflashTraining
from speccompile.speculators.dflash.drafter import NESTED, drafter_from_config
from speccompile.speculators.dflash.layouts import LAYERS, METHOD
from speccompile.speculators.dflash.model import BlockAttention, BlockLayer, CandidateSelector, DynamicConv, Fusion
from speccompile.training_contract import (
    Drafted,
    Selection,
    TargetNeeds,
    TargetParts,
    TrainingBatch,
    chosen_mask,
    layer_sizes,
)

Angles = tuple[torch.Tensor, torch.Tensor]


class BlockHeads(Fusion):
    """The drafter without the target's embeddings and LM head, by the checkpoint's names; called, it makes features."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        layers = tuple(config[NESTED][LAYERS])
        dims = replace(dims_from_config(Path(CONFIG), config, METHOD, 1), layers=layers)
        super().__init__(config, dims)
        self.config, self.drafter, self.read_layers = dict(config), drafter_from_config(CONFIG, config), layers
        layer = layer_config(config)
        self.norm = LlamaRMSNorm(dims.hidden_size, layer.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(layer, self.drafter) for _ in range(dims.num_layers))
        self.rotary = LlamaRotaryEmbedding(layer)
        if rank := self.drafter.selector_rank:
            self.candidate_selector = CandidateSelector(dims.hidden_size, dims.vocab_size, dims.vocab_size, rank)

    def pair_scores(self, states: torch.Tensor, before: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.candidate_selector(states[None], before[None, :, None], candidates[None])
        return scores[0, :, 0]


def fill_blocks(
    network: Any, features: torch.Tensor, embedded: torch.Tensor, root_positions: torch.Tensor, shift: int = 0
) -> torch.Tensor:
    """Returns what the LM head reads of every row of some blocks.

    Args:
        features: [batch, positions, hidden], the context.
        embedded: [batch, blocks, rows, hidden], of roots and masks.
        root_positions: [batch, blocks] int64, the position of each root; its block sees the context before it.
    """
    count, blocks, rows, _ = embedded.shape
    context_angles = network.rotary(features, torch.arange(features.shape[1], device=features.device)[None])
    positions = root_positions[..., None] + torch.arange(rows, device=root_positions.device) + shift
    angles = network.rotary(features, positions.flatten(0, 1))
    x = embedded.flatten(0, 1)
    for layer, is_causal in zip(network.layers, network.drafter.is_causal, strict=True):
        attention: Any = layer.self_attn
        seen = _visible(root_positions, rows, features.shape[1], is_causal)

        def attend(y: torch.Tensor, attention: Any = attention, seen: Any = seen) -> torch.Tensor:
            return attend_blocks(attention, y, features, angles, context_angles, seen)

        x = layer(x, attend)
    filled: torch.Tensor = network.norm(x).unflatten(0, (count, blocks))
    return filled


def _visible(
    root_positions: torch.Tensor, rows: int, positions: int, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the positions that a block sees [batch, blocks, positions], and the rows that a row sees [rows, rows]."""
    own = torch.ones(rows, rows, dtype=torch.bool, device=root_positions.device)
    return torch.arange(positions, device=root_positions.device) < root_positions[
        ..., None
    ], own.tril() if is_causal else own


def _rotated(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """x: [batch, heads, rows, head_dim], with cosines and sines [batch or 1, rows, head_dim]."""
    cos, sin = (part[:, None] for part in angles)
    return x * cos + rotate_half(x) * sin


def attend_blocks(
    attention: BlockAttention,
    y: torch.Tensor,
    features: torch.Tensor,
    angles: Angles,
    context_angles: Angles,
    seen: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Returns the attention's output of blocks that share contexts, [batch * blocks, rows, hidden].

    `y` [batch * blocks, rows, hidden] is its input, `features` [batch, positions, hidden] the context.
    """
    dim, count, rows = attention.head_dim, len(features), y.shape[1]

    def keys_of(x: torch.Tensor, turned: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (split_heads(part(x), dim) for part in (attention.k_proj, attention.v_proj))
        return _rotated(attention.k_norm(k), turned), v

    q = _rotated(attention.q_norm(split_heads(attention.q_proj(y), dim)), angles) * dim**-0.5
    k, v = keys_of(y, angles)  # [batch * blocks, kv_heads, rows, dim]
    past_k, past_v = keys_of(features, context_angles)
    group = q.shape[1] // k.shape[1]
    q = q.unflatten(1, (-1, group))  # [batch * blocks, kv_heads, group, rows, dim]
    own = (q.flatten(2, 3) @ k.transpose(2, 3)).unflatten(2, (group, rows)).float()
    own = own.masked_fill(~seen[1], -math.inf)
    # One product of all blocks of a text with its context: [batch, kv_heads, blocks * group * rows, dim].
    wide = q.unflatten(0, (count, -1)).transpose(1, 2)
    shape = wide.shape[2:5]
    past = (wide.flatten(2, 4) @ past_k.transpose(2, 3)).unflatten(2, shape).float()
    past = past.masked_fill(~seen[0][:, None, :, None, None], -math.inf)
    own = own.unflatten(0, (count, -1)).transpose(1, 2)
    probs = torch.cat((past, own), -1).softmax(-1).to(v.dtype)
    num = past.shape[-1]
    mixed = (probs[..., :num].flatten(2, 4) @ past_v).unflatten(2, shape).transpose(1, 2).flatten(0, 1)
    inner = probs[..., num:].transpose(1, 2).flatten(0, 1).flatten(2, 3)
    mixed = mixed + (inner @ v).unflatten(2, (group, rows))
    return attention.o_proj(join_heads(mixed.flatten(1, 2)))


class TrainableBlocks(nn.Module):
    """A `Trainable` over the target's `parts`; roots of blocks are at `starts`, a share of the positions."""

    def __init__(self, heads: BlockHeads, parts: TargetParts, starts: float) -> None:
        super().__init__()
        self.heads, self.starts, self.num_positions = heads, starts, heads.drafter.max_drafts
        self.register_buffer("embeddings", parts.embeddings, persistent=False)
        self.register_buffer("lm_head", parts.lm_head, persistent=False)

    def _blocks(
        self, features: torch.Tensor, roots: torch.Tensor, root_positions: torch.Tensor, num: int
    ) -> torch.Tensor:
        masks = torch.full((*roots.shape, num), self.heads.drafter.mask_token_id, device=roots.device)
        embedded = self.embeddings[torch.cat((roots[..., None], masks), -1)]
        return fill_blocks(self.heads, features, embedded, root_positions)[:, :, 1:]

    def forward(self, batch: TrainingBatch) -> Drafted:
        """Returns the drafts; a block whose root is at t reads features before t, and imitates what follows t."""
        num, nodes = self.num_positions, batch.tokens.shape[1]
        features = self.heads([batch.layers[i].float() for i in self.heads.read_layers])
        # A root at the text's last positions would have drafts without a label.
        most, wanted = max(1, nodes - num + 1), round(nodes * self.starts)
        roots = drawn_positions(batch.tokens, most, wanted, batch.seed, batch.is_label)
        states = self._blocks(features, torch.gather(batch.tokens, 1, roots), roots, num).flatten(0, 1)
        labels = labels_of(batch.tokens, roots, num)
        before = batch.tokens.flatten()[labels.clamp(min=0)]
        drafter = self.heads.drafter
        selection = Selection(drafter.num_candidates, before, self.heads.pair_scores) if drafter.is_paired else None
        return Drafted(states, labels, (self.lm_head,) * num, selection=selection)

    @torch.no_grad()
    def draft(self, batch: TrainingBatch, num: int) -> torch.Tensor:
        """Returns the most probable walk over one block."""
        features = self.heads([batch.layers[i].float() for i in self.heads.read_layers])
        root_positions = torch.full((1, 1), batch.tokens.shape[1] - 1, device=batch.tokens.device)
        states = self._blocks(features, batch.tokens[:, -1:], root_positions, num)[0, 0]
        logits = states @ self.lm_head.T
        if not self.heads.drafter.is_paired:
            return logits.argmax(-1)
        unary, candidates = logits.topk(min(self.heads.drafter.num_candidates, logits.shape[-1]))
        token, drafted = batch.tokens[0, -1:], []
        for slot in range(num):
            part = slice(slot, slot + 1)
            scores = unary[part] + self.heads.pair_scores(states[part], token, candidates[part])
            token = candidates[slot, scores[0].argmax()][None]
            drafted.append(token[0])
        return torch.stack(drafted)

    def save(self, folder: Path) -> None:
        """Writes z-lab's layout; embeddings and LM head are the target's and left out."""
        write_heads(folder, self.heads.config, self.heads.state_dict())


def config_from_training(
    training: DflashTraining, target: Mapping[str, Any], vocab: int, hidden: int
) -> dict[str, Any]:
    """Returns the config.json of a drafter in z-lab's layout."""
    num = int(target["num_hidden_layers"])
    mask = chosen_mask(training.mask_token_id, target, vocab)
    if hidden % training.conv_group_size and training.conv_kernel_size:
        got, expected = f"{training.conv_group_size}", f"a divisor of the hidden size {hidden}"
        raise RecipeError("training.heads.conv_group_size", got, expected, "Change it.")
    parameters = target.get("rope_parameters")
    theta = target.get("rope_theta") or (parameters.get("rope_theta") if isinstance(parameters, Mapping) else None)
    nested: dict[str, Any] = {
        "block_size": training.block_size,
        "mask_token_id": mask,
        LAYERS: list(training.chosen_layers(num)),
    }
    if training.conv_kernel_size:
        nested |= {"conv_kernel_size": training.conv_kernel_size, "conv_group_size": training.conv_group_size}
    if training.selector_rank:
        top = min(training.selector_top_k, vocab)
        nested |= {"selector_rank": training.selector_rank, "selector_top_k": top}
    return {
        "architectures": ["DFlash2DraftModel" if training.selector_rank else "DFlashDraftModel"],
        "model_type": "qwen3",
        **layer_sizes(target, hidden, training.intermediate_size),
        "num_hidden_layers": training.num_layers,
        "num_target_layers": num,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": int(target.get("max_position_embeddings") or 2048),
        "rms_norm_eps": float(target.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(theta or 10000.0),
        "layer_types": ["full_attention"] * training.num_layers,
        "is_causal": training.is_causal,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        NESTED: nested,
    }


def begin_heads(config: Mapping[str, Any], parts: TargetParts) -> BlockHeads:
    """Returns a drafter with parts of the target: its last stream read as the feature, and its last layers."""
    heads, hidden = BlockHeads(config), int(config["hidden_size"])
    init_linear(heads)
    with torch.no_grad():
        heads.fc.weight.zero_()
        heads.fc.weight[:, -hidden:] = torch.eye(hidden)
        if parts.norm is not None and parts.norm.shape == heads.norm.weight.shape:
            heads.norm.weight.copy_(parts.norm)
        for layer, weights in zip(reversed(heads.layers), reversed(parts.layers), strict=False):
            copy_weights(layer, weights)
        if parts.layers:  # context rows have no other norm before their keys
            copy_weights(heads.hidden_norm, {"weight": heads.layers[-1].input_layernorm.weight})
        for conv in (part for part in heads.modules() if isinstance(part, DynamicConv)):
            conv.base_kernel.zero_()
            conv.base_kernel[:, 0] = 1.0  # every row as it is
            conv.kernel_projection.weight.zero_()
        if rank := heads.drafter.selector_rank:
            _begin_selector(heads.candidate_selector, parts, rank)
    return heads


def _begin_selector(selector: CandidateSelector, parts: TargetParts, rank: int) -> None:
    """Gives alike tokens alike rows before, and all tokens rows of 0 after, so that no pair has a score at first."""
    centred = parts.embeddings - parts.embeddings.mean(0)
    _, _, directions = torch.pca_lowrank(centred, min(rank, *centred.shape), center=False)
    rows = centred @ directions
    rows = rows / rows.pow(2).mean(0).sqrt().clamp(min=1e-6)
    selector.predecessor_codebook.zero_()
    selector.predecessor_codebook[:, : rows.shape[1]] = rows
    selector.successor_codebook.zero_()


class DflashTrainer:
    """A `speccompile.training_contract.Trainer`."""

    def needs(self, config: DflashTraining, target: Mapping[str, Any]) -> TargetNeeds:
        return TargetNeeds(layers=config.chosen_layers(int(target["num_hidden_layers"])))

    def make(self, config: DflashTraining, parts: TargetParts, start: Path | None) -> Any:
        """Returns layers like the target's last ones over its states, or `start`."""
        vocab, hidden = parts.lm_head.shape
        drafter = begin_heads(config_from_training(config, parts.config, vocab, hidden), parts)
        if start is not None:
            drafter.load_state_dict(read_heads(start, drafter.state_dict()))
        return TrainableBlocks(drafter, parts, config.starts)
