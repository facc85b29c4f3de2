# SPDX-License-Identifier: Apache-2.0
"""A small causal language model under training: every position imitates the target's distribution after it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from speccompile.checkpoints.checkpoint import check_checkpoint, read_dims
from speccompile.checkpoints.model_config import read_model_config
from speccompile.errors import CheckpointError
from speccompile.export.chains import cut_chains
from speccompile.export.weights import read_weights
from speccompile.speculators.draft_model.config import DraftModelTraining
from speccompile.training_contract import Drafted, TargetNeeds, TargetParts, TrainingBatch

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


class TrainableDraft(nn.Module):
    """A `Trainable` over a float32 transformers model; texts are cut into chains of `chain` to estimate acceptance."""

    def __init__(self, model: Any, target: Path, chain: int) -> None:
        super().__init__()
        self.model, self.target, self.num_positions = model, target, chain

    def forward(self, batch: TrainingBatch) -> Drafted:
        states = self.model.base_model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        projections = (self.model.get_output_embeddings().weight,) * self.num_positions
        return Drafted(*cut_chains(batch.tokens, states, self.num_positions), projections)

    @torch.no_grad()
    def draft(self, batch: TrainingBatch, num: int) -> torch.Tensor:
        """Returns a chain, drafted token by token with the model's cache."""
        tokens, past, drafted = batch.tokens, None, []
        for _ in range(num):
            out = self.model(input_ids=tokens, past_key_values=past, use_cache=True)
            tokens, past = out.logits[:, -1:].argmax(-1), out.past_key_values
            drafted.append(tokens[0, 0])
        return torch.stack(drafted)

    def save(self, folder: Path) -> None:
        """Writes a checkpoint of transformers with the target's tokenizer."""
        state = {k: v.detach().to(torch.bfloat16) for k, v in self.model.state_dict().items()}
        with torch.device("meta"):
            copy = type(self.model)(self.model.config)
        copy = copy.to_empty(device="cpu").to(torch.bfloat16)
        copy.load_state_dict(state)
        copy.tie_weights()
        copy.save_pretrained(folder)
        for name in _TOKENIZER:
            if (self.target / name).is_file():
                shutil.copyfile(self.target / name, folder / name)


def make_model(config: DraftModelTraining, parts: TargetParts, start: Path | None) -> Any:
    """Returns a Llama of these sizes with random weights, or the model of a checkpoint."""
    vocab, target = parts.lm_head.shape[0], parts.config
    if start is not None:
        dims = read_dims(start)
        check_checkpoint(start, dims)
        if dims.vocab_size != vocab:
            got, expected = f"a vocabulary of {dims.vocab_size} tokens", f"{vocab}, as the target has"
            raise CheckpointError(str(start), got, expected, "Start with a draft of this target.")
        return read_weights(start, read_model_config(start))[0]
    made = LlamaConfig(
        vocab_size=vocab,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_heads,
        max_position_embeddings=int(target.get("max_position_embeddings", 2048)),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=target.get("bos_token_id"),
        eos_token_id=target.get("eos_token_id"),
        pad_token_id=target.get("pad_token_id"),
    )
    return LlamaForCausalLM(made)


class DraftModelTrainer:
    """A `speccompile.training_contract.Trainer`."""

    reads_sizes = True

    def needs(self, config: DraftModelTraining, target: Mapping[str, Any]) -> TargetNeeds:
        return TargetNeeds()

    def make(self, config: DraftModelTraining, parts: TargetParts, start: Path | None) -> Any:
        return TrainableDraft(make_model(config, parts, start), parts.folder, config.chain)
