# SPDX-License-Identifier: Apache-2.0
"""Sizes and keys of a module in every layout, and what its config says about the layer. Needs no torch.

The module is one decoder layer of the target's architecture; what a config does not say is read off the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from speccompile.checkpoints import target_tables
from speccompile.checkpoints.config_values import text_config
from speccompile.doctor.decoder_rows import times
from speccompile.doctor.findings import Finding
from speccompile.doctor.layouts import Case, Row, Size, Sizes, finding, flag

LAYER = "layers.0"
EMBEDDINGS, LM_HEAD = "embed_tokens.weight", "lm_head.weight"  # stored in some layouts; otherwise the target's
NORM_EMBEDDING, NORM_HIDDEN, NORM = "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight"
# Architectures whose norms multiply by 1 + weight, and whose attention has a gate beside every query.
ONE_PLUS = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
GATED = ONE_PLUS
_QK_NORM = ONE_PLUS | {"qwen3", "qwen3_moe"}
_RAW_CHAINING = frozenset({"deepseek_v3"})
# Types whose first layer has no experts unless a list of its kinds says so.
_SPARSE_BY_LIST = frozenset({"glm4_moe_lite"})
_NUM_MODULES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
# Fields that describe the layers of a whole model one by one, or its file.
_NOT_OF_A_LAYER = (
    *("architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "per_layer_config"),
    *("quantization_config", "mlp_layer_types", "mtp_layer_types", "full_attention_interval", *_NUM_MODULES),
    *("hybrid_override_pattern", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "time_step_limit"),
)


def layer_from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a model of one layer of the kind that modules have, from a whole model's config.json."""
    whole = text_config(config)
    layer = {name: value for name, value in whole.items() if name not in _NOT_OF_A_LAYER}
    # Modules attend to the whole text, and are mixtures of experts where any layer of the target is.
    alone = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "first_k_dense_replace": 0}
    sparse = {"mlp_only_layers": [], "decoder_sparse_step": 1, "mlp_layer_types": ["sparse"]}
    kept = ("num_hidden_layers", *(name for name in (*alone, *sparse) if name in whole))
    if whole.get("model_type") in _SPARSE_BY_LIST:
        kept = (*kept, "mlp_layer_types")
    if any(name.startswith("linear_") for name in whole) or "full_attention_interval" in whole:
        kept = (*kept, "layer_types")
    return layer | {name: value for name, value in (alone | sparse).items() if name in kept}


def conventions(layer: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how a module computes: `norms`, `concat`, `chaining` and `target_hidden` of config.json, or defaults."""
    family = layer.get("model_type")
    is_hidden_first = layer.get("mtp_hidden_states_first") is True
    defaults = {
        "norms": "1+w" if family in ONE_PLUS else "w",
        "concat": "hidden_first" if is_hidden_first else "embedding_first",
        "chaining": "raw" if family in _RAW_CHAINING else "normed",
        "target_hidden": "after_norm",
    }
    return {name: config[name] if config.get(name) is not None else value for name, value in defaults.items()}


CHOICES = {
    "norms": ("w", "1+w"),
    "concat": ("embedding_first", "hidden_first"),
    "chaining": ("normed", "raw"),
    "target_hidden": ("after_norm", "before_norm"),
}


def module_sizes(*scopes: str) -> tuple[Size, ...]:
    """Returns the sizes, from the objects of config.json that may have the layer's config: "" or ending in a dot."""

    def keys(*names: str) -> tuple[str, ...]:
        return tuple(scope + name for name in names for scope in scopes)

    return (
        Size("hidden", keys("hidden_size"), stored=((r"^(fc|eh_proj)\.weight$", 0),)),
        Size("vocab", keys("vocab_size")),
        Size("num_heads", keys("num_attention_heads")),
        Size("num_kv_heads", keys("num_key_value_heads"), default=0, least=0),
        Size("head_dim", keys("head_dim"), default=0, least=0),
        Size("inner", keys("intermediate_size"), default=0, least=0),
        Size("expert_inner", keys("moe_intermediate_size"), default=0, least=0),
        Size("num_experts", keys("num_experts", "n_routed_experts", "num_local_experts"), default=0, least=0),
        Size("num_modules", keys(*_NUM_MODULES), default=1, least=0),
        # Latent attention's.
        Size("rank", keys("kv_lora_rank"), default=0, least=0),
        Size("q_rank", keys("q_lora_rank"), default=0, least=0),
        Size("nope", keys("qk_nope_head_dim"), default=0, least=0),
        Size("rotary", keys("qk_rope_head_dim"), default=0, least=0),
        Size("value_dim", keys("v_head_dim"), default=0, least=0),
        # Read off the weights: configs have other keys for them in every family, or none.
        Size("q_width", stored=((r"self_attn\.q_proj\.weight$", 0),), default=0, least=0),
        Size("shared_inner", stored=((r"mlp\.shared_experts?\.up_proj\.weight$", 0),), default=0, least=0),
        flag("has_qkv_bias", present=r"self_attn\.q_proj\.bias$"),
        flag("has_o_bias", present=r"self_attn\.o_proj\.bias$"),
        flag("has_qk_norm", present=r"self_attn\.[qk]_norm\.weight$"),
        flag("has_mlp", present=r"mlp\.(gate|up|down)_proj\.weight$"),
        flag("has_single_experts", present=r"mlp\.experts\.\d+\."),
        flag("has_fused_experts", present=r"mlp\.experts\.(gate_up|down)_proj$"),
        flag("has_shared_experts", present=r"mlp\.shared_experts\."),
        flag("has_shared_expert", present=r"mlp\.shared_expert(_gate)?\."),
        flag("has_router_bias", present=r"mlp\.gate\.e_score_correction_bias$"),
    )


def derive(sizes: Sizes) -> None:
    """Adds the sizes that follow from others."""
    heads, hidden = sizes["num_heads"], sizes["hidden"]
    sizes["num_kv_heads"] = sizes["num_kv_heads"] or heads
    sizes["head_dim"] = sizes["head_dim"] or (hidden // heads if hidden and heads else None)
    sizes["o_width"], sizes["kv_width"] = (
        times(sizes[count], sizes["head_dim"]) for count in ("num_heads", "num_kv_heads")
    )
    if sizes["rank"]:
        _derive_latent(sizes)
    sizes["q_width"] = sizes["q_width"] or sizes["o_width"]
    sizes["has_kv"] = int(not sizes["rank"])
    sizes["has_q"] = int(not (sizes["rank"] and sizes["q_rank"]))
    sizes["has_low_q"] = int(not sizes["has_q"])
    sizes["two_hidden"], sizes["two_inner"] = times(2, hidden), times(2, sizes["expert_inner"])
    sizes["target_hidden"] = hidden
    is_sparse = sizes["has_single_experts"] or sizes["has_fused_experts"]
    sizes["has_experts"], sizes["num_layers"] = int(bool(is_sparse)), 1
    if not is_sparse:
        sizes["has_mlp"] = 1


def _derive_latent(sizes: Sizes) -> None:
    heads, rotary = sizes["num_heads"], sizes["rotary"] or 0
    sizes["o_width"] = times(heads, sizes["value_dim"])
    sizes["q_width"] = times(heads, (sizes["nope"] or 0) + rotary)
    sizes["row_width"] = (sizes["rank"] or 0) + rotary
    sizes["expanded"] = times(heads, (sizes["nope"] or 0) + (sizes["value_dim"] or 0))


def module_rows(names: Mapping[str, str], layer: str) -> tuple[Row, ...]:
    """Returns the keys of a module.

    Args:
        names: key in the layout by the canonical name, of the parts beside the layer.
        layer: prefix of the layer's keys with its dot; empty where it has none.
    """

    def part(name: str, *dims: str, table: str = "") -> Row:
        return Row(names.get(name, name), dims, name=name, is_optional=bool(table), table=table)

    def row(tail: str, *dims: str | int, need: str = "", over: tuple[tuple[str, str, int], ...] = ()) -> Row:
        return Row(f"{layer}{tail}", dims, over, f"{LAYER}.{tail}", need=need)

    each = (("expert", "num_experts", 0),)
    heads = {"q": "q_width", "k": "kv_width", "v": "kv_width"}
    needs = {"q": "has_q", "k": "has_kv", "v": "has_kv"}
    single, shared = (
        {"gate": (inner, "hidden"), "up": (inner, "hidden"), "down": ("hidden", inner)}
        for inner in ("expert_inner", "shared_inner")
    )
    return (
        part("fc.weight", "hidden", "two_hidden"),
        *(part(name, "hidden") for name in (NORM_EMBEDDING, NORM_HIDDEN, NORM)),
        part(EMBEDDINGS, "vocab", "hidden", table=target_tables.EMBEDDINGS),
        part(LM_HEAD, "vocab", "hidden", table=target_tables.LM_HEAD),
        row("input_layernorm.weight", "hidden"),
        row("post_attention_layernorm.weight", "hidden"),
        *(row(f"self_attn.{p}_proj.weight", w, "hidden", need=needs[p]) for p, w in heads.items()),
        row("self_attn.q_a_proj.weight", "q_rank", "hidden", need="has_low_q"),
        row("self_attn.q_a_layernorm.weight", "q_rank", need="has_low_q"),
        row("self_attn.q_b_proj.weight", "q_width", "q_rank", need="has_low_q"),
        row("self_attn.kv_a_proj_with_mqa.weight", "row_width", "hidden", need="rank"),
        row("self_attn.kv_a_layernorm.weight", "rank", need="rank"),
        row("self_attn.kv_b_proj.weight", "expanded", "rank", need="rank"),
        *(row(f"self_attn.{p}_proj.bias", width, need="has_qkv_bias") for p, width in heads.items()),
        row("self_attn.o_proj.weight", "hidden", "o_width"),
        row("self_attn.o_proj.bias", "hidden", need="has_o_bias"),
        *(row(f"self_attn.{p}_norm.weight", "head_dim", need="has_qk_norm") for p in "qk"),
        *(row(f"mlp.{p}_proj.weight", "inner", "hidden", need="has_mlp") for p in ("gate", "up")),
        row("mlp.down_proj.weight", "hidden", "inner", need="has_mlp"),
        row("mlp.gate.weight", "num_experts", "hidden", need="has_experts"),
        row("mlp.gate.e_score_correction_bias", "num_experts", need="has_router_bias"),
        *(
            row(f"mlp.experts.{{expert}}.{p}_proj.weight", *dims, need="has_single_experts", over=each)
            for p, dims in single.items()
        ),
        row("mlp.experts.gate_up_proj", "num_experts", "two_inner", "hidden", need="has_fused_experts"),
        row("mlp.experts.down_proj", "num_experts", "hidden", "expert_inner", need="has_fused_experts"),
        *(
            row(f"mlp.{name}.{p}_proj.weight", *dims, need=f"has_{name}")
            for name in ("shared_expert", "shared_experts")
            for p, dims in shared.items()
        ),
        row("mlp.shared_expert_gate.weight", 1, "hidden", need="has_shared_expert"),
    )


def fuse_experts(config: Mapping[str, Any], tensors: dict[str, Any]) -> None:
    """Stacks the weights of single experts, as the layer computes with them: gates above ups, then downs."""
    import torch

    first = f"{LAYER}.mlp.experts"
    num = sum(name.startswith(first) and name.endswith(".down_proj.weight") for name in tensors)
    if not num:
        return
    gates, ups, downs = (
        [tensors.pop(f"{first}.{i}.{part}_proj.weight") for i in range(num)] for part in ("gate", "up", "down")
    )
    tensors[f"{first}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
    tensors[f"{first}.down_proj"] = torch.stack(downs)


def check_layer(case: Case) -> Iterator[Finding]:
    """Yields findings where the keys are not those of the architecture that the config names."""
    layer = case.canonical_config()["layer_config"]
    family, sizes = layer.get("model_type"), case.sizes
    todo = "Config and weights are of different models: fetch the folder again, or correct config.json."
    width = times(2 if family in GATED else 1, sizes["o_width"])
    if width is not None and sizes["q_width"] != width and not sizes["rank"]:
        kind = "queries and their gates" if family in GATED else "queries"
        expected = f"{width} rows: {kind} of {sizes['num_heads']} heads of {sizes['head_dim']}"
        key = case.key_of(f"{LAYER}.self_attn.q_proj.weight") or "q_proj"
        yield finding("error", case.where(key), f"{sizes['q_width']} rows", expected, todo)
    if family in _QK_NORM and not sizes["has_qk_norm"]:
        yield finding("error", case.where(), "no q_norm and k_norm", f"those of a layer of {family}", todo)
    if not isinstance(family, str):
        yield finding("error", case.where_in_config("model_type"), repr(family), "the layer's architecture", todo)
    if (sizes["num_modules"] or 0) > 1:
        todo = "Only the first module would draft. Take a checkpoint with one, or say so with --set."
        where = case.where_in_config(*_NUM_MODULES)
        yield finding("error", where, f"{sizes['num_modules']} modules", "one, which drafts every token", todo)


def check_conventions(case: Case) -> Iterator[Finding]:
    """Yields a finding for each convention of a config that has a value of its own."""
    config = case.canonical_config()
    for name, known in CHOICES.items():
        if config[name] not in known:
            todo = "Correct config.json."
            yield finding("error", case.where_in_config(name), repr(config[name]), " or ".join(known), todo)


def check_norms(case: Case) -> Iterator[Finding]:
    """Yields a warning where the weights of a norm look like the other form."""
    config, key = case.canonical_config(), case.key_of(NORM_HIDDEN)
    if case.reads_values and key is not None and case.files.headers[key].dtype in ("F32", "F16", "BF16"):
        mean = float(case.files.tensor(key).float().mean())
        # Weights of released modules scatter around 0 where they are 1 + w, and around 1 or above elsewhere; a hint.
        if (config["norms"] == "1+w" and mean > 0.75) or (config["norms"] == "w" and mean < 0.1):
            other = "w" if config["norms"] == "1+w" else "1+w"
            todo = f"If nothing is accepted, give speculator.norms: {other}; some conversions store the other form."
            yield finding(
                "warning", case.where(key), f"a mean of {mean:.2f}", f"weights read as {config['norms']}", todo
            )
