# SPDX-License-Identifier: Apache-2.0
"""Tiny multimodal checkpoints as transformers writes them, of every type whose language model can be taken alone."""

from pathlib import Path
from typing import Any

from tests.export.families import VOCAB
from tests.lab.weights import randomize

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "sliding_window": 5, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB, "per_layer_config": {1: {"head_dim": 12}}, "layer_rope_theta": [1e4, 0],
}  # fmt: skip
_OTHER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28,
    "patch_size": 14, "num_heads": 2, "depth": 1, "embed_dim": 32, "out_hidden_size": 32, "mlp_ratio": 1,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip
_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


def tower_config(model_type: str, **changes: Any) -> Any:
    """transformers' config of a tiny multimodal model; `changes` are of its language model."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    fields = kind().to_dict()
    defaults = CONFIG_MAPPING[fields["text_config"]["model_type"]]().to_dict()
    text = {**defaults, **{name: size for name, size in _TEXT.items() if name in defaults}}
    if defaults.get("layer_types"):
        text["layer_types"] = [*dict.fromkeys(defaults["layer_types"]), "full_attention"][:2]
    if "vl" in model_type.split("_"):
        text["rope_parameters"] = _AXES
    for name, part in fields.items():
        if isinstance(part, dict) and name.endswith("_config"):
            fields[name] = {**part, **{key: size for key, size in _OTHER.items() if key in part}}
            if kinds := part.get("layer_types"):
                fields[name]["layer_types"] = kinds[: _OTHER["num_hidden_layers"]]
    return kind.from_dict({**fields, "text_config": {**text, **changes}})


def make_tower(config: Any, folder: Path, seed: int = 0) -> Any:
    """Saves a random multimodal model; returns it with transformers' eager attention."""
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomize(model)
    model.save_pretrained(folder)
    return model.eval()
