# SPDX-License-Identifier: Apache-2.0
"""Modules of two blocks, each of one mixer after a norm (Nemotron-H): attention, then experts or an MLP. No torch.

The first block joins embedding and hidden state, the last has the final norm. Positions are not rotated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speccompile.checkpoints.layer_sizes import mixer_kinds
from speccompile.doctor.layouts import Row, Size, Sizes, flag
from speccompile.errors import ExportError
from speccompile.speculators.mtp.layer_rows import NORM, NORM_EMBEDDING, NORM_HIDDEN

FAMILY = "nemotron_h"
FULL, LINEAR = "full_attention", "linear_attention"
_MIXER = "layers.1.mixer"
_NAMES = {
    "fc.weight": "layers.0.eh_proj.weight",
    NORM_EMBEDDING: "layers.0.enorm.weight",
    NORM_HIDDEN: "layers.0.hnorm.weight",
    NORM: "layers.1.final_layernorm.weight",
}


def layer_of_blocks(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the module's blocks that differ from those of a whole model's config."""
    stated = {"layers_block_type": whole.get("mtp_layers_block_type")}
    stated["hybrid_override_pattern"] = whole.get("mtp_hybrid_override_pattern") or "*E"
    kinds = mixer_kinds({"model_type": FAMILY, **stated}, 2)
    if len(kinds) != 2 or kinds[0] != FULL or kinds[1] in (FULL, LINEAR):
        expected = "attention, then experts or an MLP"
        raise ExportError(f"a module of {FAMILY}", f"blocks {', '.join(kinds)}", expected, "Draft with another method.")
    return {"layers_block_type": list(kinds), "num_hidden_layers": 2}


def block_sizes() -> tuple[Size, ...]:
    """Returns the sizes, of the target's config."""

    def stored(name: str, key: str, axis: int = 0) -> Size:
        return Size(name, stored=((rf"^layers\.1\.mixer\.{key}\.weight$", axis),), default=0, least=0)

    return (
        Size("hidden", ("hidden_size",)),
        Size("vocab", ("vocab_size",)),
        Size("num_heads", ("num_attention_heads",)),
        Size("num_kv_heads", ("num_key_value_heads",)),
        Size("head_dim", ("head_dim",)),
        Size("num_experts", ("n_routed_experts", "num_local_experts"), default=0, least=0),
        Size("num_modules", ("num_nextn_predict_layers",), default=1, least=0),
        Size("inner", ("intermediate_size",), default=0, least=0),
        Size("expert_inner", ("moe_intermediate_size",), default=0, least=0),
        Size("shared_inner", ("moe_shared_expert_intermediate_size",), default=0, least=0),
        stored("latent", "fc1_latent_proj"),
        flag("has_experts", present=r"^layers\.1\.mixer\.(gate|experts)\."),
        flag("has_mlp", present=r"^layers\.1\.mixer\.up_proj\."),
    )


def derive_blocks(sizes: Sizes) -> None:
    """Adds the sizes that follow from others."""
    hidden, head_dim = sizes["hidden"], sizes["head_dim"] or 0
    sizes["q_width"], sizes["kv_width"] = ((sizes[n] or 0) * head_dim for n in ("num_heads", "num_kv_heads"))
    sizes["two_hidden"] = None if hidden is None else 2 * hidden
    sizes["expert_width"] = sizes["latent"] or hidden
    if not sizes["has_experts"]:
        sizes["num_experts"], sizes["has_mlp"] = 0, 1
    sizes["target_hidden"], sizes["num_layers"] = hidden, 1


def block_rows() -> tuple[Row, ...]:
    """Returns the keys."""
    heads = {"q": "q_width", "k": "kv_width", "v": "kv_width"}
    each, experts = (("expert", "num_experts", 0),), f"{_MIXER}.experts.{{expert}}"
    return (
        Row(_NAMES["fc.weight"], ("hidden", "two_hidden"), name="fc.weight"),
        *(Row(_NAMES[name], ("hidden",), name=name) for name in (NORM_EMBEDDING, NORM_HIDDEN, NORM)),
        *(Row(f"layers.{i}.norm.weight", ("hidden",)) for i in range(2)),
        *(Row(f"layers.0.mixer.{p}_proj.weight", (width, "hidden")) for p, width in heads.items()),
        Row("layers.0.mixer.o_proj.weight", ("hidden", "q_width")),
        Row(f"{_MIXER}.up_proj.weight", ("inner", "hidden"), need="has_mlp"),
        Row(f"{_MIXER}.down_proj.weight", ("hidden", "inner"), need="has_mlp"),
        Row(f"{_MIXER}.gate.weight", ("num_experts", "hidden"), need="has_experts"),
        Row(f"{_MIXER}.gate.e_score_correction_bias", ("num_experts",), need="has_experts"),
        Row(f"{experts}.up_proj.weight", ("expert_inner", "expert_width"), each, need="has_experts"),
        Row(f"{experts}.down_proj.weight", ("expert_width", "expert_inner"), each, need="has_experts"),
        Row(f"{_MIXER}.shared_experts.up_proj.weight", ("shared_inner", "hidden"), need="has_experts"),
        Row(f"{_MIXER}.shared_experts.down_proj.weight", ("hidden", "shared_inner"), need="has_experts"),
        Row(f"{_MIXER}.fc1_latent_proj.weight", ("latent", "hidden"), need="latent"),
        Row(f"{_MIXER}.fc2_latent_proj.weight", ("hidden", "latent"), need="latent"),
    )


def stack_experts(config: Mapping[str, Any], tensors: dict[str, Any]) -> None:
    """Stacks the weights of single experts, as the block computes with them."""
    import torch

    for part in ("up_proj", "down_proj"):
        num = sum(name.startswith(f"{_MIXER}.experts.") and name.endswith(f"{part}.weight") for name in tensors)
        if num:
            one = [tensors.pop(f"{_MIXER}.experts.{i}.{part}.weight") for i in range(num)]
            tensors[f"{_MIXER}.experts.{part}"] = torch.stack(one)
