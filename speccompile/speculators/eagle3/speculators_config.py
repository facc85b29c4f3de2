# SPDX-License-Identifier: Apache-2.0
"""The config of the speculators format (vLLM project) for EAGLE-3 and P-EAGLE drafters, and back. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from speccompile.doctor.decoder_rows import decoder_config, speculators_format
from speccompile.doctor.findings import Finding
from speccompile.doctor.layouts import Case, Sizes, Target, finding, lookup
from speccompile.errors import CheckpointError

SCOPE = "transformer_layer_config."
FULL, SLIDING = "full_attention", "sliding_attention"  # of `layer_types`
PEAGLE = "peagle"  # of `speculators_model_type`
LAYERS = "eagle_aux_hidden_state_layer_ids"


def check_config(case: Case) -> Iterator[Finding]:
    """Yields a finding for each missing part without which vLLM does not load the config."""
    todo = "Complete config.json: vLLM does not load it without."
    if not isinstance(case.config.get("transformer_layer_config"), Mapping):
        yield finding("error", case.where_in_config("transformer_layer_config"), "nothing", "the layer's config", todo)
    algorithm = lookup(case.config, "speculators_config.algorithm")
    kind = case.config.get("speculators_model_type")
    if algorithm != kind:
        where = case.where_in_config("speculators_config.algorithm")
        yield finding("error", where, repr(algorithm), f"{kind!r}, as speculators_model_type says", todo)
    methods = lookup(case.config, "speculators_config.proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
    num = first.get("speculative_tokens")
    if type(num) is not int or num < 1:
        where = case.where_in_config("speculators_config.proposal_methods")
        yield finding("error", where, repr(methods), "a method with its speculative_tokens", todo)
    if not lookup(case.config, "speculators_config.verifier.name_or_path"):
        where = case.where_in_config("speculators_config.verifier.name_or_path")
        yield finding("error", where, "nothing", "the target's name", todo)


def check_residual(case: Case) -> Iterator[Finding]:
    """Yields a finding for a missing switch, whose default differs between the format's readers but for P-EAGLE."""
    switch = case.config.get("norm_before_residual")
    if switch is None and case.config.get("speculators_model_type") == PEAGLE:
        return
    if not isinstance(switch, bool):
        where, got = case.where_in_config("norm_before_residual"), repr(switch)
        todo = "vLLM takes true, the speculators library false: give what it was trained with, in config.json or --set."
        yield finding("error", where, got, "true or false", todo)


def windows_of(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...] | None:
    """Returns each layer's window in tokens, 0: none; None: `layer_types` and `sliding_window` disagree."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    if kinds is None:
        is_off = not window or config.get("use_sliding_window", True) is False
        return (0,) * num_layers if is_off else None
    if not isinstance(kinds, list) or any(kind not in (FULL, SLIDING) for kind in kinds):
        return None
    if SLIDING not in kinds:  # as many as the target has, where a trainer began with its config
        return (0,) * num_layers
    if len(kinds) != num_layers or type(window) is not int or window < 1 or config.get("use_sliding_window") is False:
        return None
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def layer_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config that describes the layers."""
    nested = config.get("transformer_layer_config")
    return nested if isinstance(nested, Mapping) else config


def window_config(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = config.get("layer_types")
    has_some = isinstance(kinds, list) and SLIDING in kinds
    return {name: config.get(name) for name in ("layer_types", "sliding_window")} if has_some else {}


def check_windows(case: Case) -> Iterator[Finding]:
    """Yields a finding for windows that readers of the config would take in different ways."""
    num = case.sizes.get("num_layers") or 1
    layer = layer_of(case.config)
    if windows_of(layer, num) is None:
        got = f"layer_types {layer.get('layer_types')!r} and sliding_window {layer.get('sliding_window')!r}"
        expected = f"{num} of {FULL} and {SLIDING}, and a window where one slides"
        todo = "State both in config.json or --set: without layer_types vLLM attends to all tokens."
        yield finding("error", case.where_in_config("layer_types", "sliding_window"), got, expected, todo)


def masks_from_sizes(sizes: Sizes, name: str) -> dict[str, Any]:
    """Returns what a config in the canonical layout says of the masks: nothing where there are none."""
    token = sizes["mask_token"]
    return {"parallel_drafting": True, name: None if token == -1 else token} if sizes["has_masks"] else {}


def config_from_canonical(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    """Returns the config of the speculators format. `target`: names the verifier; without it the config must."""
    for key in ("qk_norm", "target_layer_ids"):
        if config.get(key):
            expected = "what readers of the format know"
            raise CheckpointError(f"config.json ({key})", repr(config[key]), expected, "Keep it in our own layout.")
    layer = {k: v for k, v in decoder_config(config).items() if v is not None} | window_config(config)
    kept = {key: config[key] for key in (LAYERS, "fc_norm", "norm_output") if config.get(key)}
    hidden, target_hidden = config["hidden_size"], config.get("target_hidden_size") or config["hidden_size"]
    token = config.get("ptd_token_id") if config.get("parallel_drafting") else None
    kind, architecture = ("eagle3", "Eagle3Speculator") if token is None else (PEAGLE, "PEagleSpeculator")
    return {
        "architectures": [architecture],
        **speculators_format(kind, "0.3.0", target, name=config.get("base_model_name_or_path")),
        "transformer_layer_config": {**layer, "model_type": "llama", "tie_word_embeddings": False},
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        "norm_before_fc": bool(config.get("norm_before_fc", False)),
        **({} if token is None else {"mask_token_id": token}),
        "target_hidden_size": None if hidden == target_hidden else target_hidden,
        **kept,
    }
