# SPDX-License-Identifier: Apache-2.0
"""A Gemma 4 assistant as it is published, at tiny sizes: a sliding and a full layer, tokens by centroid."""

from pathlib import Path

import torch

from tests.checkpoints.lab_files import HEAD_DIM, HEADS, HIDDEN, INNER, SMALL, VOCAB, draw, save

FULL_DIM, CENTROIDS = 2 * HEAD_DIM, 4
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def gemma4_assistant(folder: Path) -> Path:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, SMALL),
        "model.norm.weight": (SMALL,),
        "pre_projection.weight": (SMALL, 2 * HIDDEN),
        "post_projection.weight": (HIDDEN, SMALL),
        "masked_embedding.centroids.weight": (CENTROIDS, SMALL),
    }
    for i, width in enumerate((HEAD_DIM, FULL_DIM)):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{name}.weight": (SMALL,) for name in _NORMS}
        shapes |= {f"{layer}.mlp.{part}_proj.weight": (INNER, SMALL) for part in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (SMALL, INNER), f"{layer}.layer_scalar": (1,)}
        shapes |= {f"{layer}.self_attn.q_proj.weight": (HEADS * width, SMALL)}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (SMALL, HEADS * width)}
        shapes |= {f"{layer}.self_attn.q_norm.weight": (width,)}
    text = {
        "model_type": "gemma4_text", "hidden_size": SMALL, "vocab_size": VOCAB, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD_DIM, "global_head_dim": FULL_DIM,
        "intermediate_size": INNER, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 2,
    }  # fmt: skip
    config = {
        "model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"], "text_config": text,
        "backbone_hidden_size": HIDDEN, "use_ordered_embeddings": True, "num_centroids": CENTROIDS,
        "centroid_intermediate_top_k": 2,
    }  # fmt: skip
    return save(folder, config, {**draw(shapes), "masked_embedding.token_ordering": torch.randperm(VOCAB)})
