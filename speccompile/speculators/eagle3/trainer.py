# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 or P-EAGLE drafter under training: the first draft at every position, further ones from drawn starts.

Further drafts of EAGLE-3 are unrolled on the drafter's own features; those of P-EAGLE are masks, which one run fills.
`heads.py` has the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speccompile.errors import CheckpointError, RecipeError
from speccompile.export.heads_file import WEIGHTS, read_heads, write_heads
from speccompile.export.layers import copy_weights
from speccompile.speculators.eagle3.config import Eagle3Training
from speccompile.speculators.eagle3.heads import EagleHeads, EagleSizes, KeyValues, config_from_sizes
from speccompile.speculators.eagle3.layouts import EMBEDDINGS
from speccompile.training_contract import Drafted, TargetNeeds, TargetParts, TrainingBatch, chosen_mask

_MASK_ROW = "mask_embedding"  # the parameter that is a row of the embeddings in a checkpoint


class TrainableEagle3(nn.Module):
    """See `speccompile.training_contract.Trainable`.

    A drafter that saw only the target's features in training drafts one token well and no further ones: so training
    runs it as drafting does, unrolled ("training-time test" of EAGLE-3's paper) or over masks (P-EAGLE's).

    Args:
        starts: share of positions from which whole chains are drafted.
    """

    def __init__(self, heads: EagleHeads, parts: TargetParts, steps: int, starts: float) -> None:
        super().__init__()
        self.heads, self.num_positions, self.starts = heads, steps, starts
        self.reads_masks = heads.sizes.mask_token is not None
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
        feature = torch.gather(features, 1, first_positions[..., None].expand(-1, -1, features.shape[-1]))[:, :, None]
        if self.reads_masks:
            embedded, masks = self.heads.masks(count, num, self.num_positions - 1)
            further, _ = self.heads.extend(embedded, masks, first_positions, context)
        else:
            further = self._unrolled(batch.tokens, feature, first_positions, context)
        states = self.heads.scored(torch.cat((feature, further), 2))
        ahead = first_positions[..., None] + 1 + torch.arange(self.num_positions, device=device)
        rows = torch.arange(count, device=device)[:, None, None]
        labels = torch.where(ahead < nodes, rows * nodes + ahead, -1)
        projections = (self.heads.lm_head.weight,) * self.num_positions
        return Drafted(states.flatten(0, 1), labels.flatten(0, 1), projections, self.heads.target_tokens())

    def _unrolled(
        self, tokens: torch.Tensor, feature: torch.Tensor, first_positions: torch.Tensor, context: list[KeyValues]
    ) -> torch.Tensor:
        """Returns the features after the first one [batch, starts, drafts - 1, hidden], each made of the one before."""
        made, chains = [feature[:, :, :0]], None
        for step in range(1, self.num_positions):
            read = torch.gather(tokens, 1, (first_positions + 1 + step).clamp(max=tokens.shape[1] - 1))[..., None]
            feature, chains = self.heads.extend(self.embeddings[read], feature, first_positions, context, chains)
            made.append(feature)
        return torch.cat(made, 2)

    @torch.no_grad()
    def draft(self, batch: TrainingBatch, num: int) -> torch.Tensor:
        """Returns a chain: reads all features, then drafts on its own with a growing cache, or from masks at once."""
        features = self.heads.fuse([batch.layers[i].float() for i in self.heads.sizes.layers])
        embedded, nodes = self.embeddings[batch.tokens[:, 1:]], features.shape[1]
        if self.reads_masks:
            mask_embedded, masks = self.heads.masks(1, num - 1)
            embedded, features = torch.cat((embedded, mask_embedded), 1), torch.cat((features, masks), 1)
        rows = features.shape[1]
        mask = torch.ones(rows, rows, dtype=torch.bool).tril()
        features, held = self.heads.read(embedded, features, torch.arange(rows)[None], None, mask)
        if self.reads_masks:
            return self._likeliest(features[0, nodes - 1 :])
        feature, drafted = features[:, -1:], []
        for step in range(num):
            token = self._likeliest(feature)
            drafted.append(token[0, 0])
            if step + 1 < num:
                position = torch.full((1, 1), nodes + step)
                feature, held = self.heads.read(self.embeddings[token], feature, position, held, None)
        return torch.stack(drafted)

    def _likeliest(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the target's likeliest tokens after next features: [..., hidden] -> [...] int64."""
        tokens, of_target = self.heads.lm_head(self.heads.scored(features)).argmax(-1), self.heads.target_tokens()
        return tokens if of_target is None else of_target[tokens]

    def save(self, folder: Path) -> None:
        """Writes the layout of the first release; the embeddings are the target's and left out, but for masks."""
        tensors = self.heads.state_dict()
        if self.reads_masks:
            tensors[EMBEDDINGS] = self._table(tensors.pop(_MASK_ROW))
        write_heads(folder, config_from_sizes(self.heads.sizes), tensors)

    def _table(self, row: torch.Tensor) -> torch.Tensor:
        table = self.embeddings.to(row).clone()
        table[self.heads.sizes.mask_token] = row
        return table

    def load(self, folder: Path) -> None:
        """Reads a checkpoint of the same sizes.

        Raises:
            CheckpointError: it does not hold what the sizes imply, or embeddings that are not the target's.
        """
        wanted = self.heads.state_dict()
        if not self.reads_masks:
            self.heads.load_state_dict(read_heads(folder, wanted))
            return
        wanted.pop(_MASK_ROW)
        held = read_heads(folder, {**wanted, EMBEDDINGS: self.embeddings})
        table = held.pop(EMBEDDINGS)
        held[_MASK_ROW] = table[self.heads.sizes.mask_token].clone()
        if not torch.equal(table, self._table(held[_MASK_ROW]).to(torch.bfloat16).float()):
            got, expected = "embeddings of its own", "the target's, but for the mask's token"
            todo = "Only drafters whose other embeddings are the target's are trained further."
            raise CheckpointError(f"{folder / WEIGHTS} ({EMBEDDINGS})", got, expected, todo)
        self.heads.load_state_dict(held)


def begin_heads(sizes: EagleSizes, parts: TargetParts) -> EagleHeads:
    """Returns a drafter with parts of the target: its last stream as the feature, its last layers, norm and LM head."""
    heads = EagleHeads(sizes)
    hidden = sizes.target_hidden_size
    with torch.no_grad():
        heads.fc.weight.zero_()
        heads.fc.weight[:, -hidden:] = torch.eye(sizes.hidden_size, hidden)
        if parts.norm is not None and parts.norm.shape == heads.norm.weight.shape:
            heads.norm.weight.copy_(parts.norm)
        own = [heads.midlayer, *heads.layers.values()]
        for layer, weights in zip(reversed(own), reversed(parts.layers), strict=False):
            copy_weights(layer, weights)
        if sizes.mask_token is not None:
            heads.mask_embedding.copy_(parts.embeddings[sizes.mask_token])
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
        return TargetNeeds(layers=config.chosen_layers(int(target["num_hidden_layers"])))

    def make(self, config: Eagle3Training, parts: TargetParts, start: Path | None) -> Any:
        """Returns layers like the target's last ones after its last fused stream, or `start`."""
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
            num_hidden_layers=config.num_layers,
            mask_token=chosen_mask(config.mask_token_id, target, vocab) if config.parallel_drafting else None,
        )
        made = TrainableEagle3(begin_heads(sizes, parts), parts, config.unrolled_steps, config.starts)
        if start is not None:
            made.load(start)
        return made
