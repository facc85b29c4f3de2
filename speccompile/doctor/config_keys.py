# SPDX-License-Identifier: Apache-2.0
"""Keys of a speculator's config.json that its layout does not read: known to change nothing, or a finding. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from speccompile.checkpoints.config_values import OBJECTS, wrong_values
from speccompile.common.json_reader import shown
from speccompile.doctor.findings import Finding
from speccompile.doctor.layouts import Case, Format, finding

_REASONS = {
    "names of classes, files, versions and other models": """
        architectures model_type auto_map torch_dtype dtype transformers_version base_model_name_or_path name_or_path
        base_config_key sub_configs is_composition has_no_defaults_at_init keys_to_ignore_at_inference
        base_model_tp_plan base_model_pp_plan base_model_ep_plan
        target_model_name_or_path target_model_type target_model verifier speculators_config speculators_model_type
        speculators_version quantization_config task_specific_params problem_type finetuning_task tokenizer_class prefix
        id2label label2id num_labels custom_pipelines language license tags library_name pipeline_tag version""",
    "weights show it: every key and shape of the files is compared": """
        tie_word_embeddings num_experts num_local_experts num_experts_per_tok experts_per_token n_routed_experts
        n_shared_experts moe_intermediate_size shared_expert_intermediate_size decoder_sparse_step mlp_only_layers
        first_k_dense_replace moe_layer_freq norm_topk_prob n_group topk_group topk_method scoring_func
        routed_scaling_factor ep_size num_target_layers draft_num_hidden_layers has_lm_head
        enable_confidence_head use_confidence_head confidence_head_with_markov
        num_nextn_predict_layers mtp_num_hidden_layers
        parallel_draft_heads_num_layers tie_encoder_decoder max_window_layers""",
    "of training": """
        attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob resid_pdrop embd_pdrop
        attn_pdrop dropout classifier_dropout initializer_range initializer_std pretraining_tp router_aux_loss_coef
        output_router_logits aux_loss_alpha seq_aux router_jitter_noise ttt_length step_loss_decay loss_decay_gamma
        num_anchors ce_loss_alpha l1_loss_alpha confidence_head_alpha freeze_embedding embed_requires_grad""",
    "how another program runs it": """
        use_cache return_dict output_attentions output_hidden_states torchscript use_bfloat16 tf_legacy_loss
        pruned_heads num_lookahead_tokens chunk_size_feed_forward is_decoder is_encoder_decoder add_cross_attention
        cross_attention_hidden_size attn_implementation cache_implementation gradient_checkpointing
        use_flash_attention attention_backend max_position_embeddings initial_context_length model_max_length""",
    "of generation": """
        bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id
        forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids max_length min_length do_sample
        early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
        length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences output_scores
        return_dict_in_generate remove_invalid_values exponential_decay_length_penalty""",
    "of images": "image_token_id video_token_id vision_start_token_id vision_end_token_id",
}
_HARMLESS = frozenset(name for names in _REASONS.values() for name in names.split())
# Values with which a key says what is computed anyway.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("rope_is_neox_style", "is_neox_style"), (True,)),
    **dict.fromkeys(("rope_interleave", "rope_interleaved", "rope_traditional", "interleaved"), (False,)),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rotary_percent"), (1,)),
    **dict.fromkeys(("input_embedding_scale", "embedding_scale", "embedding_multiplier", "scale_emb"), (1,)),
    **dict.fromkeys(("residual_multiplier", "scale_depth", "logits_scaling", "logit_scale", "output_multiplier"), (1,)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("mlp_bias", "attention_bias", "qkv_bias", "bias", "use_bias", "lm_head_bias"), (False,)),
    **dict.fromkeys(("use_qk_norm", "qk_norm", "attention_sinks", "attention_sink_bias"), (False,)),
    **dict.fromkeys(("attention_k_eq_v", "attn_output_gate", "use_mtp_layernorm", "sandwich_norm"), (False,)),
    **dict.fromkeys(("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_aux_hidden_state"), (True,)),
    "skip_prenorm": (True,),
    "skip_output_norm": (True,),
    "add_para_norm": (False,),
    **dict.fromkeys(("use_sliding_window", "use_swa"), (False,)),
    "parallel_draft_step": (1,),
    "next_layer_regular": (True,),
    "attention_mode": ("gqa", "mha"),
    "eagle_decoder_type": ("llama",),
    "swiglu_limit": (),
}
ROTARY = ("rope_scaling", "rope_parameters")
_OF_ROTARY = (
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor",
    "beta_fast", "beta_slow", "short_factor", "long_factor", "mscale", "mscale_all_dim", "truncate",
    "original_max_position_embeddings",
)  # fmt: skip
_IMAGES = ("mrope", "mrope_section", "mrope_interleaved")  # positions of images: a text's are the default ones


def plain_rotary(rotary: Mapping[str, Any], kinds: Any) -> dict[str, Any]:
    """Returns the rotary parameters of all layers: those of the one kind that there is, where they are by kind."""
    by_kind = {kind: rope for kind, rope in rotary.items() if isinstance(rope, Mapping)}
    used = set(kinds) if isinstance(kinds, list) and kinds else set(by_kind)
    if by_kind and used <= by_kind.keys() and all(by_kind[kind] == by_kind[min(used)] for kind in used):
        rotary = by_kind[min(used)]
    rope = {name: value for name, value in rotary.items() if name not in _IMAGES}
    return rope | {name: "default" for name in ("type", "rope_type") if rope.get(name) in _IMAGES}


def rotary_reads(scope: str = "") -> tuple[str, ...]:
    """Returns the keys of rotary positions; `scope` is the object that holds them, followed by a dot."""
    return (f"{scope}rope_theta", *(f"{scope}{held}.{name}" for held in ROTARY for name in _OF_ROTARY))


def check_keys(case: Case) -> Iterator[Finding]:
    for key, got, expected in unread_keys(case.config, case.layout):
        todo = "The drafts would be of another network. If it changes nothing, write the folder without it: "
        todo += f"speccompile convert ... --set {key}=null."
        yield finding("error", case.where_in_config(key), got, expected, todo)


def unread_keys(config: Mapping[str, Any], layout: Format) -> Iterator[tuple[str, str, str]]:
    """Yields (key, value as text, what was expected) of keys with values that cannot be meant, or that are not read."""
    if layout.reads is None:
        return
    layers = [held for name in OBJECTS if isinstance(held := config.get(name), Mapping)]
    for held in (config, *layers):
        yield from wrong_values(held)
    read = {*layout.reads, *(key for size in layout.sizes for key in size.keys)}
    yield from _unread(config, "", read, layout.fixed)


def _unread(
    config: Mapping[str, Any], scope: str, read: Collection[str], fixed: Mapping[str, tuple[Any, ...]]
) -> Iterator[tuple[str, str, str]]:
    for name, value in config.items():
        key = scope + name
        if name in ROTARY and isinstance(value, Mapping):
            value = plain_rotary(value, config.get("layer_types"))
            if any(isinstance(part, Mapping) for part in value.values()):
                yield key, "angles that differ by the kind of layer", "one set for all layers"
                continue
        # An object's keys are compared where some are read.
        if isinstance(value, Mapping) and key not in read and any(other.startswith(f"{key}.") for other in read):
            yield from _unread(value, f"{key}.", read, fixed)
            continue
        is_empty = value is None or value in ("", [], {})
        if is_empty or name.startswith("_") or (name not in fixed and (key in read or name in _HARMLESS)):
            continue
        allowed = fixed.get(name, _NEUTRAL.get(name))
        if name == "query_pre_attn_scalar":
            heads = config.get("num_attention_heads") or 1
            allowed = (config.get("head_dim") or config.get("hidden_size", 0) // heads,)
        elif name == "hidden_activation":
            allowed = (config.get("hidden_act") or value,)
        if allowed is None:
            yield key, shown(value), "keys that are read, or known to change nothing"
        elif value not in allowed:
            yield key, shown(value), f"{' or '.join(map(repr, allowed))}, as it is computed" if allowed else "none"
