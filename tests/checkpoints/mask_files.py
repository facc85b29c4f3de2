# SPDX-License-Identifier: Apache-2.0
"""Drafts that read masks, in their published layouts."""

from pathlib import Path

import torch

from tests.checkpoints.lab_files import (
    DRAFT_VOCAB,
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    LLAMA,
    VOCAB,
    Tensors,
    draw,
    edit,
    layer_shapes,
    save,
    set_config,
)

MASK = 37
_KEPT = [0, 1, 2, 3, 5, 8, 9, 13, 21, 30, 34, 39]  # the target's tokens that P-EAGLE drafts
_PEAGLE = {**LLAMA, "num_hidden_layers": 3, "draft_vocab_size": DRAFT_VOCAB, "norm_before_residual": False}


def pard(folder: Path) -> Path:
    """An ordinary language model whose config names a mask token."""
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= layer_shapes(f"model.layers.{i}", HIDDEN, HIDDEN)
    return save(folder, {**LLAMA, "tie_word_embeddings": True, "pard_token": MASK}, draw(shapes))


def _peagle(first: str, mask: tuple[int, ...], prefix: str = "") -> Tensors:
    """The keys of EAGLE-3 with three layers, of which the first reads two vectors, and states of masks."""
    shapes = {
        "embed_tokens.weight": (VOCAB, HIDDEN), "fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN), "mask_hidden": mask, f"{first}.hidden_norm.weight": (HIDDEN,),
        **layer_shapes(first, HIDDEN, 2 * HIDDEN),
        **layer_shapes("layers.1", HIDDEN, HIDDEN), **layer_shapes("layers.2", HIDDEN, HIDDEN),
    }  # fmt: skip
    tensors, kept = draw(shapes), torch.tensor(_KEPT)
    tensors["d2t"] = kept - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True)
    return {prefix + key: tensor for key, tensor in tensors.items()}


def peagle_ours(folder: Path) -> Path:
    config = {"architectures": ["PeagleLlamaForCausalLM"], "ptd_token_id": MASK, "parallel_drafting": True}
    return save(folder, {**_PEAGLE, **config}, _peagle("midlayer", (1, 1, 3 * HIDDEN)))


def peagle_numbered(folder: Path) -> Path:
    """Keys with a prefix, flat states, and the mask token by PARD's key."""
    tensors = _peagle("layers.0", (1, 3 * HIDDEN), "model.")
    return save(folder, {**_PEAGLE, "architectures": ["LlamaForCausalLMEagle3"], "pard_token": MASK}, tensors)


def peagle_speculators(folder: Path) -> Path:
    layer = {k: v for k, v in LLAMA.items() if k != "architectures"} | {"num_hidden_layers": 3}
    method = {"proposal_type": "greedy", "speculative_tokens": 4, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    config = {
        "architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle", "speculators_version": "0.5.0",
        "draft_vocab_size": DRAFT_VOCAB, "mask_token_id": MASK, "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "speculators_config": {
            "algorithm": "peagle", "default_proposal_method": "greedy", "proposal_methods": [method],
            "verifier": {"name_or_path": "someone/model", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
    }  # fmt: skip
    return save(folder, config, _peagle("layers.0", (1, 1, 3 * HIDDEN)))


def peagle_qwen(folder: Path) -> Path:
    """Layers of Qwen3, which have norms of queries and keys, and the kinds of the target's layers."""
    norms = {f"layers.{i}.self_attn.{p}_norm.weight": (HEAD_DIM,) for i in range(3) for p in "qk"}
    edit(peagle_speculators(folder), lambda held: held.update(draw(norms)))
    kinds = {"transformer_layer_config__layer_types": ["full_attention"] * LAYERS}
    set_config(folder, transformer_layer_config__model_type="qwen3", **kinds)
    return folder
