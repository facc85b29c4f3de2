# SPDX-License-Identifier: Apache-2.0
"""What several layouts share: rows of a Llama-like decoder layer, and the speculators format. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speccompile.checkpoints.config_values import plain_values
from speccompile.doctor.config_keys import ROTARY, plain_rotary, rotary_reads
from speccompile.doctor.layouts import Row, Size, Sizes, Target, flag
from speccompile.errors import CheckpointError

# Of layers of our own, see `export.layers`.
PLAIN_LAYER: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    **dict.fromkeys(("rope_type", "type"), ("default",)),
    **dict.fromkeys(("attention_bias", "qkv_bias"), (False,)),
}


def decoder_sizes(scope: str = "") -> tuple[Size, ...]:
    """Returns the sizes of a decoder layer from a Llama config, in the object `scope` of config.json with its dot."""

    def keys(*names: str) -> tuple[str, ...]:
        return tuple(scope + name for name in names)

    return (
        Size("hidden", keys("hidden_size"), stored=((r"(^|\.)norm\.weight$", 0),)),
        Size("inner", keys("intermediate_size"), stored=((r"up_proj\.weight$", 0),)),
        Size("num_heads", keys("num_attention_heads")),
        Size("num_kv_heads", keys("num_key_value_heads"), default=0, least=0),
        Size("head_dim", keys("head_dim"), default=0, least=0),
        flag("has_qkv_bias", *keys("qkv_bias", "attention_bias")),
        flag("has_o_bias", *keys("attention_bias")),
    )


def derive_decoder(sizes: Sizes) -> None:
    """Add `num_kv_heads` and `head_dim` where the config lacks them, `q_width` and `kv_width`."""
    heads, hidden = sizes.get("num_heads"), sizes.get("hidden")
    sizes["num_kv_heads"] = sizes.get("num_kv_heads") or heads
    if not sizes.get("head_dim"):
        sizes["head_dim"] = hidden // heads if hidden and heads else None
    sizes["q_width"] = times(heads, sizes["head_dim"])
    sizes["kv_width"] = times(sizes["num_kv_heads"], sizes["head_dim"])


def times(*values: int | None) -> int | None:
    """Returns the product; None where a factor is not known."""
    product = 1
    for value in values:
        if value is None:
            return None
        product *= value
    return product


def decoder_rows(
    layer: str,
    over: tuple[tuple[str, str, int], ...] = (),
    *,
    name: str = "",
    qkv_input: str = "hidden",
    has_input_norm: bool = True,
) -> tuple[Row, ...]:
    """Returns the keys of decoder layers.

    Args:
        layer: template of their prefix, without the last dot.
        name: `layer` in the canonical layout; the same by default.
        qkv_input: size from which queries, keys and values are projected.
    """

    def row(tail: str, *dims: str, need: str = "") -> Row:
        return Row(f"{layer}.{tail}", dims, over, f"{name or layer}.{tail}", need=need)

    heads = {"q": "q_width", "k": "kv_width", "v": "kv_width"}
    return (
        *(row(f"self_attn.{p}_proj.weight", width, qkv_input) for p, width in heads.items()),
        *(row(f"self_attn.{p}_proj.bias", width, need="has_qkv_bias") for p, width in heads.items()),
        row("self_attn.o_proj.weight", "hidden", "q_width"),
        row("self_attn.o_proj.bias", "hidden", need="has_o_bias"),
        row("mlp.gate_proj.weight", "inner", "hidden"),
        row("mlp.up_proj.weight", "inner", "hidden"),
        row("mlp.down_proj.weight", "hidden", "inner"),
        *((row("input_layernorm.weight", "hidden"),) if has_input_norm else ()),
        row("post_attention_layernorm.weight", "hidden"),
    )


_KEPT = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", *ROTARY,
    "attention_bias", "qkv_bias", "mlp_bias", "vocab_size", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def decoder_reads(scope: str = "") -> tuple[str, ...]:
    """Returns the keys that `decoder_config` reads, in an object of the config; see `decoder_sizes`."""
    own = (f"{scope}{name}" for name in _KEPT if name not in (*ROTARY, "mlp_bias"))
    return (*own, *rotary_reads(scope), f"{scope}layer_types")


def decoder_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a Llama config that describes a layer of a speculator."""
    made = {name: value for name, value in plain_values(config).items() if name in _KEPT and value is not None}
    if config.get("hidden_activation") is not None:  # Gemma's name for it
        made.setdefault("hidden_act", config["hidden_activation"])
    for name in ROTARY:
        if isinstance(rotary := made.get(name), Mapping):
            made[name] = plain_rotary(rotary, config.get("layer_types"))
    return made


PROPOSAL = {"speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}  # vLLM's defaults


def speculators_format(
    kind: str, version: str, target: Target | None, method: Mapping[str, Any] = PROPOSAL, name: str | None = None
) -> dict[str, Any]:
    """Returns what a config in the speculators format (vLLM project) has beside the layers."""
    name = name if target is None else target.name
    if not name:
        raise CheckpointError("config.json", "nothing", "the target's name", "Give the target with --target.")
    architectures = [] if target is None else list(target.config.get("architectures") or [])
    return {
        "speculators_model_type": kind,
        "speculators_version": version,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", **method}],
            "verifier": {"name_or_path": name, "architectures": architectures},
        },
    }
