# SPDX-License-Identifier: Apache-2.0
"""Narrow layers of the same kinds: fewer heads and inner widths, the widths of a head and of a state as published."""

from __future__ import annotations

import math

from bench.pairs.targets import Config

MAX_WIDTH = 512  # of hidden states, inner layers and low ranks
MAX_KV_HEADS = 2
_KEPT_RANKS = ("kv_lora_rank",)  # the row of a latent cache
_HIDDEN = ("hidden_size", "n_embd", "emb_dim", "backbone_hidden_size")
# Heads of a kind, and those that follow their number.
_HEADS = (
    ("num_key_value_heads", ("num_attention_heads",)),
    ("linear_num_key_heads", ("linear_num_value_heads",)),
    ("n_groups", ("mamba_num_heads",)),
)


def narrow(config: Config, known: dict[int, int] | None = None) -> Config:
    """Returns a config of narrow layers.

    Queries keep their number for each K and V head, unless that is one.

    Args:
        config: of a model or a speculator.
        known: hidden sizes that are given, by the published ones: a speculator's are its target's.
    """
    made = {name: _width(name, value) for name, value in config.items()}
    for shared, following in _HEADS:
        if made.get(shared):
            num = min(config[shared], MAX_KV_HEADS)
            made |= {name: config[name] // config[shared] * num for name in following if name in config}
            made[shared] = num
    if "n_head" in made:
        made["n_head"] = 2 * MAX_KV_HEADS
    if "num_global_key_value_heads" in made:
        made["num_global_key_value_heads"] = min(config["num_global_key_value_heads"], MAX_KV_HEADS)
    hidden = hidden_size(config)
    if hidden:
        widths = {hidden: _hidden_size(config, made), **(known or {})}
        made |= {name: widths.get(config[name], min(config[name], MAX_WIDTH)) for name in _HIDDEN if name in config}
    for name in ("text_config", "dflash_config"):
        if isinstance(config.get(name), dict):
            made[name] = narrow(config[name], known)
    return made


def hidden_size(config: Config) -> int:
    """Returns the width of the hidden states of a config; 0: it is in another part."""
    return next((config[name] for name in _HIDDEN if name in config), 0)


def _hidden_size(config: Config, made: Config) -> int:
    """Returns the narrow one, which follows from the heads where a config does not say their width."""
    hidden, num = hidden_size(config), config.get("num_attention_heads") or config.get("n_head")
    if num is None or "head_dim" in config or "qk_nope_head_dim" in config:
        step = math.lcm(64, made.get("num_attention_heads", 1))  # some configs want a multiple of the heads
        return min(hidden, -(-MAX_WIDTH // step) * step)
    return hidden // num * (made.get("num_attention_heads") or made["n_head"])


def _width(name: str, value: object) -> object:
    is_width = "intermediate" in name or name.endswith(("inner_dim", "n_inner", "_lora_rank", "latent_size"))
    return min(value, MAX_WIDTH) if is_width and isinstance(value, int) and name not in _KEPT_RANKS else value
