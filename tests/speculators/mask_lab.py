# SPDX-License-Identifier: Apache-2.0
"""Tiny drafts that read masks, fitted to the target's texts."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.speculators.eagle_lab import VOCAB, fitted, texts_of

MASK, NUM_FITTED = 37, 4


@torch.no_grad()
def pard_model() -> LlamaForCausalLM:
    """Returns a wide random model of one layer."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, rms_norm_eps=1e-5, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(7)
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0, 1.0 if "embed" in name else 0.3)
    return model


@torch.no_grad()
def write_pard(folder: Path, target: Path) -> Path:
    """Writes `pard_model` with an LM head that fits the target's texts best, after masks too."""
    model = pard_model()
    inputs, wanted = [], []
    for text in texts_of(target)[0]:
        tokens = text[0]
        for end in range(1, len(tokens) - NUM_FITTED):
            read = torch.cat((tokens[:end], torch.full((NUM_FITTED - 1,), MASK)))
            inputs.append(model.model(read[None]).last_hidden_state[0, end - 1 :])
            wanted.append(8 * torch.eye(VOCAB)[tokens[end : end + NUM_FITTED]])
    model.lm_head.weight.copy_(fitted(inputs, wanted, 0.1))
    return save_pard(folder, model, target)


def save_pard(folder: Path, model: LlamaForCausalLM, target: Path) -> Path:
    """Writes a model as a draft that reads masks, with the target's tokenizer."""
    model.save_pretrained(folder)
    held = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**held, "pard_token": MASK}))
    (folder / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    return folder
