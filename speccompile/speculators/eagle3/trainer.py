# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 or P-EAGLE drafter under training: the first draft at every position, further ones from drawn starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speccompile.errors import CheckpointError, RecipeError
from speccompile.export.chains import IMPLEMENTATION, Mask, drawn_chains, greedy_chain, register
from speccompile.export.feature_source import dims_from_config
from speccompile.export.heads_file import CONFIG, WEIGHTS, read_heads, write_heads
from speccompile.export.layers import copy_weights, init_linear
from speccompile.speculators.eagle3.config import Eagle3Training
from speccompile.speculators.eagle3.layouts import EMBEDDINGS, IDS, MASK_TOKENS, OUTPUTS
from speccompile.speculators.eagle3.model import Eagle3Body, Fusion
from speccompile.training_contract import Drafted, TargetNeeds, TargetParts, TrainingBatch, chosen_mask, layer_sizes

_MASK_ROW = "mask_embedding"  # the parameter that is a row of the embeddings in a checkpoint


class TrainableEagle3(nn.Module):
    """A `Trainable` that runs as drafting does, else it drafts one token well and no further ones.

    Later drafts are unrolled on its own features ("training-time test" of EAGLE-3's paper), or read masks (P-EAGLE's).
    """

    def __init__(self, config: Mapping[str, Any], training: Eagle3Training, parts: TargetParts) -> None:
        super().__init__()
        register()
        layers = training.chosen_layers(int(parts.config["num_hidden_layers"]))
        self.config, self.dims = config, replace(dims_from_config(Path(CONFIG), config, "eagle3", 1), layers=layers)
        self.num_positions, self.starts = training.unrolled_steps, training.starts
        num_draft, vocab = self.dims.draft_vocab_size, self.dims.vocab_size
        self.fusion, self.body = Fusion(config, self.dims), Eagle3Body(config, self.dims, None)
        self.body.embed_tokens = None  # the target's, or with a mask's row
        self.body.config._attn_implementation = IMPLEMENTATION
        self.rotary, self.mask_token = self.body.make_rotary(), config.get(MASK_TOKENS[0])
        self.register_buffer("embeddings", parts.embeddings, persistent=False)
        if self.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fusion.fc.in_features))
            self.mask_embedding = nn.Parameter(parts.embeddings[self.mask_token].clone())
        if num_draft != vocab:
            self.register_buffer("d2t", torch.zeros(num_draft, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(vocab, dtype=torch.bool))
        init_linear(self)

    def target_tokens(self) -> torch.Tensor | None:
        """Returns [draft vocab] int64, the target's token of each draft token; None where the vocabularies are one."""
        offsets = getattr(self, "d2t", None)
        return None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)

    def _features(self, batch: TrainingBatch) -> torch.Tensor:
        return self.fusion([batch.layers[i].float() for i in self.dims.layers])

    def _mask(self) -> Mask | None:
        if self.mask_token is None:
            return None
        streams = self.mask_hidden.flatten().chunk(len(self.dims.layers))
        return self.mask_token, self.fusion(list(streams))

    def _advance(self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embedded = self.embeddings[tokens]
        if self.mask_token is not None:
            embedded = torch.where((tokens == self.mask_token)[..., None], self.mask_embedding, embedded)
        return self.body.read(embedded, features, self.rotary(features, positions))

    def forward(self, batch: TrainingBatch) -> Drafted:
        """Returns the drafts; a chain that starts at t reads features up to t and tokens up to t + 1, the root."""
        features, num = self._features(batch), self.num_positions
        own, labels = drawn_chains(
            self._advance, batch.tokens, features, num, self.starts, batch.seed, self._mask(), batch.is_label
        )
        projections = (self.body.lm_head.weight,) * num
        return Drafted(self.body.finish(own), labels, projections, self.target_tokens())

    @torch.no_grad()
    def draft(self, batch: TrainingBatch, num: int) -> torch.Tensor:
        """Returns a chain: reads all features, then drafts on its own, or from masks."""
        return greedy_chain(self._advance, self._best, batch.tokens, self._features(batch), num, self._mask())

    def _best(self, own: torch.Tensor) -> torch.Tensor:
        tokens, of_target = self.body.logits(own).argmax(-1), self.target_tokens()
        return tokens if of_target is None else of_target[tokens]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by the names of the canonical layout, the mask's row apart."""
        own = {name: tensor for name, tensor in self.state_dict().items() if "." not in name}
        return {**self.fusion.state_dict(), **self.body.state_dict(), **own}

    def save(self, folder: Path) -> None:
        """Writes the layout of the first release; the embeddings are the target's and left out, but for masks."""
        tensors = self.tensors()
        if self.mask_token is not None:
            tensors[EMBEDDINGS] = self._table(tensors.pop(_MASK_ROW))
        write_heads(folder, self.config, tensors)

    def _table(self, row: torch.Tensor) -> torch.Tensor:
        table = self.embeddings.to(row).clone()
        table[self.mask_token] = row
        return table

    def load(self, folder: Path) -> None:
        """Reads a checkpoint of the same sizes. Raises CheckpointError: other tensors or embeddings."""
        own = self.tensors()
        if self.mask_token is None:
            self._fill(own, read_heads(folder, own))
            return
        others = {name: tensor for name, tensor in own.items() if name != _MASK_ROW}
        read = read_heads(folder, {**others, EMBEDDINGS: self.embeddings})
        table = read.pop(EMBEDDINGS)
        read[_MASK_ROW] = table[self.mask_token].clone()
        if not torch.equal(table, self._table(read[_MASK_ROW]).to(torch.bfloat16).float()):
            got, expected = "embeddings of its own", "the target's, but for the mask's token"
            todo = "Only drafters whose other embeddings are the target's are trained further."
            raise CheckpointError(f"{folder / WEIGHTS} ({EMBEDDINGS})", got, expected, todo)
        self._fill(own, read)

    @torch.no_grad()
    def _fill(self, own: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in own.items():
            tensor.copy_(read[name])

    @torch.no_grad()
    def begin(self, parts: TargetParts) -> None:
        """Takes over parts of the target: its last stream as the feature, its last layers, norm and LM head."""
        body, hidden, rank = self.body, self.dims.target_hidden_size, self.dims.head_rank
        self.fusion.fc.weight.zero_()
        self.fusion.fc.weight[:, -hidden:] = torch.eye(self.dims.hidden_size, hidden)
        if parts.norm is not None and parts.norm.shape == body.norm.weight.shape:
            body.norm.weight.copy_(parts.norm)
        for layer, weights in zip(
            reversed([body.midlayer, *body.layers.values()]), reversed(parts.layers), strict=False
        ):
            copy_weights(layer, weights)
        chosen = torch.arange(self.dims.vocab_size)
        if self.target_tokens() is not None:
            num = self.dims.draft_vocab_size
            chosen = parts.token_counts.argsort(descending=True, stable=True)[:num].sort().values
            self.d2t.copy_(chosen - torch.arange(num))
            self.t2d[chosen] = True
        head = parts.lm_head[chosen]
        if rank:
            down = best_rows(head, rank)
            body.lm_head_down.weight.copy_(down)
            head = head.double() @ down.T
        body.lm_head.weight.copy_(head)


def best_rows(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns rows [rank, width] float64: `matrix @ rows.T @ rows` is the nearest matrix of that rank.

    They are eigenvectors of the small Gram matrix, as decomposing a matrix of a vocabulary's rows would take long.
    """
    wide = matrix.double()
    return torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -rank:].T


class Eagle3Trainer:
    """A `speccompile.training_contract.Trainer`."""

    def needs(self, config: Eagle3Training, target: Mapping[str, Any]) -> TargetNeeds:
        return TargetNeeds(layers=config.chosen_layers(int(target["num_hidden_layers"])))

    def make(self, config: Eagle3Training, parts: TargetParts, start: Path | None) -> Any:
        """Returns layers like the target's last ones after its last fused stream, or `start`."""
        made = TrainableEagle3(config_from_training(config, parts), config, parts)
        made.begin(parts)
        if start is not None:
            made.load(start)
        return made


def config_from_training(training: Eagle3Training, parts: TargetParts) -> dict[str, Any]:
    """Returns the config.json of a drafter."""
    (vocab, hidden), target = parts.lm_head.shape, parts.config
    num_draft = training.draft_vocab_size or vocab
    if num_draft > vocab:
        expected = f"at most {vocab}, as the target has"
        raise RecipeError("training.heads.draft_vocab_size", f"{num_draft}", expected, "Lower it.")
    if training.head_rank >= min(hidden, num_draft):
        expected = f"below {min(hidden, num_draft)}, the smaller side of the LM head"
        raise RecipeError("training.heads.head_rank", f"{training.head_rank}", expected, "Lower it, or write 0.")
    masks: dict[str, Any] = {}
    if training.parallel_drafting:
        masks = {"parallel_drafting": True, MASK_TOKENS[0]: chosen_mask(training.mask_token_id, target, vocab)}
    layers = training.chosen_layers(int(target["num_hidden_layers"]))
    # The published ids count states before layers: layer i's output is the state before i + 1. Those that begin with 1
    # are read as outputs, so that the first layer's output needs the other key.
    named = {OUTPUTS: list(layers)} if layers[0] == 0 else {IDS[0]: [i + 1 for i in layers]}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **layer_sizes(target, hidden, training.intermediate_size),
        "num_hidden_layers": training.num_layers,
        "hidden_act": "silu",
        "rms_norm_eps": float(target.get("rms_norm_eps", 1e-5)),
        "rope_theta": 10000.0,
        "vocab_size": vocab,
        "draft_vocab_size": num_draft,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        **({"fc_norm": True} if training.fc_norm else {}),
        **({"norm_output": True} if training.norm_output else {}),
        **({"head_rank": training.head_rank} if training.head_rank else {}),
        **masks,
        **named,
    }
