# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 drafter under training: the first draft at every position, further ones on its own features.

Its network is one decoder layer over (embedding of the next token, feature of this position). The feature of a position
that the target has read is fc(three residual streams of the target); that of a draft is the drafter's own output after
its layer, before the norm. EAGLE-3.1 norms each of the streams, and its drafts read that output after the norm. The
layer has its own cache: row t belongs to the feature of position t and the token at t + 1. After Li et al. 2025,
"EAGLE-3" (arXiv 2503.01840), and the published code. `model.py` has the same network for graphs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speccompile.errors import RecipeError
from speccompile.export.heads_file import read_heads, write_heads
from speccompile.export.layers import RmsNorm, SelfAttention, SwiGlu, attend, copy_weights, init_linear, join_heads
from speccompile.speculators.eagle3.config import Eagle3Training
from speccompile.speculators.eagle3.layouts import NUM_STREAMS
from speccompile.training_contract import Drafted, TargetNeeds, TargetParts, TrainingBatch

KeyValues = tuple[torch.Tensor, torch.Tensor]  # [batch, kv_heads, rows, head_dim] each


@dataclass(frozen=True)
class EagleSizes:
    """Sizes, with the names of config.json.

    Args:
        hidden_size: of the drafter.
        target_hidden_size: of the target.
        intermediate_size: of the MLP.
        num_attention_heads: of the layer.
        num_key_value_heads: of the layer.
        head_dim: of a head.
        vocab_size: of the target.
        draft_vocab_size: tokens that can be drafted.
        layers: decoder layers of the target whose residual streams are fused, from 0.
        rms_norm_eps: of the norms.
        rope_theta: base of the positions.
        norm_before_residual: the layer's residual is the normed feature.
        fc_norm: each of the streams has a norm.
        norm_output: features of drafts are normed.
        head_rank: inner width of an LM head that is two products; 0: one product.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    head_rank: int = 0


class MidLayer(nn.Module):
    """The decoder layer, whose attention reads two vectors side by side."""

    def __init__(self, sizes: EagleSizes) -> None:
        super().__init__()
        width, eps, heads = sizes.hidden_size, sizes.rms_norm_eps, sizes.num_attention_heads
        self.norm_before_residual = sizes.norm_before_residual
        self.hidden_norm, self.input_layernorm = RmsNorm(width, eps), RmsNorm(width, eps)
        self.self_attn = SelfAttention(
            2 * width, width, heads, sizes.num_key_value_heads, sizes.head_dim, sizes.rope_theta
        )
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.mlp = SwiGlu(width, sizes.intermediate_size)

    def project(
        self, embedded: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns residual [batch, nodes, hidden], queries, keys and values.

        Args:
            embedded: [batch, nodes, hidden], of the tokens after the features.
            feature: [batch, nodes, hidden].
            positions: [batch, nodes] int64, of the features.
        """
        normed = self.hidden_norm(feature)
        both = torch.cat((self.input_layernorm(embedded), normed), -1)
        return (normed if self.norm_before_residual else feature, *self.self_attn.project(both, positions))

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Returns the next feature: attended [batch, heads, nodes, head_dim] -> [batch, nodes, hidden]."""
        x = residual + self.self_attn.o_proj(join_heads(attended))
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHeads(nn.Module):
    """The drafter without embeddings, which are the target's; parameters and buffers have the checkpoint's names.

    Args:
        sizes: its sizes.
    """

    def __init__(self, sizes: EagleSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.fc = nn.Linear(NUM_STREAMS * sizes.target_hidden_size, sizes.hidden_size, bias=False)
        width, eps = sizes.target_hidden_size, sizes.rms_norm_eps
        self.fc_norm = nn.ModuleList(RmsNorm(width, eps) for _ in range(NUM_STREAMS)) if sizes.fc_norm else None
        self.midlayer = MidLayer(sizes)
        self.norm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        rank = sizes.head_rank
        self.lm_head_down = nn.Linear(sizes.hidden_size, rank, bias=False) if rank else nn.Identity()
        self.lm_head = nn.Linear(rank or sizes.hidden_size, sizes.draft_vocab_size, bias=False)
        if sizes.draft_vocab_size != sizes.vocab_size:
            self.register_buffer("d2t", torch.zeros(sizes.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(sizes.vocab_size, dtype=torch.bool))
        init_linear(self)

    def target_tokens(self) -> torch.Tensor | None:
        """Returns [draft vocab] int64, the target's token of each draft token; None where the vocabularies are one."""
        offsets = getattr(self, "d2t", None)
        return None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)

    def fuse(self, streams: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the features of positions that the target has read: three [..., target hidden] -> [..., hidden]."""
        if self.fc_norm is not None:
            streams = [norm(x) for norm, x in zip(self.fc_norm, streams, strict=True)]
        return self.fc(torch.cat(tuple(streams), -1))

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Returns the next features; see `MidLayer.finish`."""
        x = self.midlayer.finish(residual, attended)
        return self.norm(x) if self.sizes.norm_output else x

    def scored(self, features: torch.Tensor) -> torch.Tensor:
        """Returns what the LM head's last product reads of next features [..., hidden]."""
        return self.lm_head_down(features if self.sizes.norm_output else self.norm(features))

    def read(
        self,
        embedded: torch.Tensor,
        feature: torch.Tensor,
        positions: torch.Tensor,
        past: KeyValues | None,
        mask: Any,
    ) -> tuple[torch.Tensor, KeyValues]:
        """Runs the layer over new positions after `past`, as inference does.

        Args:
            embedded: [batch, nodes, hidden].
            feature: [batch, nodes, hidden].
            positions: [batch, nodes] int64.
            past: keys and values of earlier positions, None at the start.
            mask: bool [nodes, rows + nodes], None where every row is seen.

        Returns:
            Next features [batch, nodes, hidden], and all keys and values.
        """
        residual, q, k, v = self.midlayer.project(embedded, feature, positions)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        return self.finish(residual, attend(q, k, v, mask)), (k, v)

    def extend(
        self,
        embedded: torch.Tensor,
        feature: torch.Tensor,
        first_positions: torch.Tensor,
        context: KeyValues,
        chains: list[KeyValues],
    ) -> tuple[torch.Tensor, KeyValues]:
        """Runs one more draft of many chains at once, each with a context of its own, as training does.

        Args:
            embedded: [batch, starts, hidden], of the chains' last tokens.
            feature: [batch, starts, hidden], the drafter's own.
            first_positions: [batch, starts] int64, the position at which each chain starts.
            context: keys and values of all positions of the text; a chain sees those up to its start.
            chains: keys and values [batch, kv_heads, starts, head_dim] of the drafts before.

        Returns:
            Next features [batch, starts, hidden], and the new rows of the chains.
        """
        residual, q, k, v = self.midlayer.project(embedded, feature, first_positions + 1 + len(chains))
        group, scale = q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[-1])
        keys, values = (x.repeat_interleave(group, 1) for x in context)
        is_later = torch.arange(keys.shape[2], device=q.device) > first_positions[:, None, :, None]
        scores = [(q @ keys.transpose(2, 3)).float().masked_fill(is_later, -math.inf) * scale]
        rows = [(ck.repeat_interleave(group, 1), cv.repeat_interleave(group, 1)) for ck, cv in [*chains, (k, v)]]
        scores += [(q * ck).float().sum(-1, keepdim=True) * scale for ck, _ in rows]
        probs = torch.cat(scores, -1).softmax(-1).to(q.dtype)
        attended = probs[..., : keys.shape[2]] @ values
        for i, (_, cv) in enumerate(rows):
            attended = attended + probs[..., keys.shape[2] + i, None] * cv
        return self.finish(residual, attended), (k, v)


class TrainableEagle3(nn.Module):
    """See `speccompile.training_contract.Trainable`.

    A drafter that saw only the target's features in training drafts one token well and no further ones: so training
    unrolls it as drafting does ("training-time test" of the paper).

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
        """Returns the drafts; a chain that starts at t reads features up to t and tokens up to t + 1, the root."""
        count, nodes = batch.tokens.shape
        features = self.heads.fuse([batch.layers[i][:, :-1].float() for i in self.heads.sizes.layers])
        device = batch.tokens.device
        positions = torch.arange(nodes - 1, device=device)[None]
        embedded = self.embeddings[batch.tokens[:, 1:]]
        mask = torch.ones(nodes - 1, nodes - 1, dtype=torch.bool, device=device).tril()
        features, context = self.heads.read(embedded, features, positions, None, mask)
        generator = torch.Generator().manual_seed(batch.seed % 2**31)
        num = max(1, round((nodes - 1) * self.starts))
        first_positions = torch.stack([torch.randperm(nodes - 1, generator=generator)[:num] for _ in range(count)]).to(
            device
        )
        feature = torch.gather(features, 1, first_positions[..., None].expand(-1, -1, features.shape[-1]))
        states = [feature]
        chains: list[KeyValues] = []
        for step in range(1, self.num_positions):
            tokens = torch.gather(batch.tokens, 1, (first_positions + 1 + step).clamp(max=nodes - 1))
            feature, drafted = self.heads.extend(self.embeddings[tokens], feature, first_positions, context, chains)
            chains.append(drafted)
            states.append(feature)
        ahead = first_positions[..., None] + 1 + torch.arange(self.num_positions, device=device)
        rows = torch.arange(count, device=device)[:, None, None]
        labels = torch.where(ahead < nodes, rows * nodes + ahead, -1)
        states = self.heads.scored(torch.stack(states, 2))
        projections = (self.heads.lm_head.weight,) * self.num_positions
        return Drafted(states.flatten(0, 1), labels.flatten(0, 1), projections, self.heads.target_tokens())

    @torch.no_grad()
    def draft(self, batch: TrainingBatch, num: int) -> torch.Tensor:
        """Returns a chain: reads all features, then drafts on its own with a growing cache."""
        features = self.heads.fuse([batch.layers[i].float() for i in self.heads.sizes.layers])
        nodes = features.shape[1]
        mask = torch.ones(nodes, nodes, dtype=torch.bool).tril()
        embedded = self.embeddings[batch.tokens[:, 1:]]
        features, held = self.heads.read(embedded, features, torch.arange(nodes)[None], None, mask)
        feature, drafted, d2t = features[:, -1:], [], self.heads.target_tokens()
        for step in range(num):
            token = self.heads.lm_head(self.heads.scored(feature)).argmax(-1)
            token = token if d2t is None else d2t[token]
            drafted.append(token[0, 0])
            if step + 1 < num:
                position = torch.full((1, 1), nodes + step)
                feature, held = self.heads.read(self.embeddings[token], feature, position, held, None)
        return torch.stack(drafted)

    def save(self, folder: Path) -> None:
        """Writes the layout of the first release; the embeddings are the target's and left out."""
        write_heads(folder, config_from_sizes(self.heads.sizes), self.heads.state_dict())


def config_from_sizes(sizes: EagleSizes) -> dict[str, Any]:
    """Returns the config.json of a drafter of these sizes."""
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
        **({"fc_norm": True} if sizes.fc_norm else {}),
        **({"norm_output": True} if sizes.norm_output else {}),
        **({"head_rank": sizes.head_rank} if sizes.head_rank else {}),
        # The published ids count states before layers: layer i's output is the state before i + 1.
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in sizes.layers],
    }


def begin_heads(sizes: EagleSizes, parts: TargetParts) -> EagleHeads:
    """Returns a drafter with parts of the target: its last stream as the feature, its last layer, norm and LM head."""
    heads = EagleHeads(sizes)
    hidden = sizes.target_hidden_size
    with torch.no_grad():
        heads.fc.weight.zero_()
        heads.fc.weight[:, -hidden:] = torch.eye(sizes.hidden_size, hidden)
        if parts.norm is not None and parts.norm.shape == heads.norm.weight.shape:
            heads.norm.weight.copy_(parts.norm)
        if parts.layers:
            copy_weights(heads.midlayer, parts.layers[-1])
        chosen = torch.arange(sizes.vocab_size)
        if sizes.draft_vocab_size != sizes.vocab_size:
            chosen = parts.token_counts.argsort(descending=True, stable=True)[: sizes.draft_vocab_size].sort().values
            heads.d2t.copy_(chosen - torch.arange(len(chosen)))
            heads.t2d[chosen] = True
        head = parts.lm_head[chosen]
        if sizes.head_rank:
            down = best_rows(head, sizes.head_rank)
            heads.lm_head_down.weight.copy_(down)
            head = head.double() @ down.T
        heads.lm_head.weight.copy_(head)
    return heads


def best_rows(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns [rank, width] float64, the right singular vectors of a matrix [.., width] with the largest values.

    `matrix @ rows.T @ rows` is the nearest matrix of that rank. They are eigenvectors of the small Gram matrix, as a
    vocabulary's own decomposition would take long.
    """
    wide = matrix.double()
    return torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -rank:].T


class Eagle3Trainer:
    """See `speccompile.training_contract.Trainer`."""

    def needs(self, config: Eagle3Training, target: Mapping[str, Any]) -> TargetNeeds:
        """Returns the needs: three residual streams."""
        return TargetNeeds(layers=config.chosen_layers(int(target["num_hidden_layers"])))

    def make(self, config: Eagle3Training, parts: TargetParts, start: Path | None) -> Any:
        """Returns a layer like the target's last one after its last fused stream, or `start`."""
        vocab, hidden = parts.lm_head.shape
        target = parts.config
        heads, num_draft = int(target["num_attention_heads"]), config.draft_vocab_size or vocab
        if num_draft > vocab:
            expected = f"at most {vocab}, as the target has"
            raise RecipeError("training.heads.draft_vocab_size", f"{num_draft}", expected, "Lower it.")
        if config.head_rank >= min(hidden, num_draft):
            expected = f"below {min(hidden, num_draft)}, the smaller side of the LM head"
            raise RecipeError("training.heads.head_rank", f"{config.head_rank}", expected, "Lower it, or write 0.")
        sizes = EagleSizes(
            hidden_size=hidden,
            target_hidden_size=hidden,
            intermediate_size=config.intermediate_size or int(target.get("intermediate_size") or 4 * hidden),
            num_attention_heads=heads,
            num_key_value_heads=int(target.get("num_key_value_heads") or heads),
            head_dim=int(target.get("head_dim") or hidden // heads),
            vocab_size=vocab,
            draft_vocab_size=num_draft,
            layers=config.chosen_layers(int(target["num_hidden_layers"])),
            rms_norm_eps=float(target.get("rms_norm_eps", 1e-5)),
            fc_norm=config.fc_norm,
            norm_output=config.norm_output,
            head_rank=config.head_rank,
        )
        drafter = begin_heads(sizes, parts)
        if start is not None:
            drafter.load_state_dict(read_heads(start, drafter.state_dict()))
        return TrainableEagle3(drafter, parts, config.unrolled_steps, config.starts)
