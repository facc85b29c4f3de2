# SPDX-License-Identifier: Apache-2.0
"""Layout of GLIDE drafters (ColossalAI's), which is ours. Needs no torch but where weights are read.

A small Llama whose layers have a cross-attention with no keys and values of its own: it reads the target's cache, so
that its queries have the target's heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.doctor.decoder_rows import decoder_config, decoder_rows, decoder_sizes, derive_decoder, times
from speccompile.doctor.doctor import read_speculator
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, Sizes, Target, finding, flag, lookup

if TYPE_CHECKING:
    import torch

_LAYER, _OVER = "model.layers.{layer}", (("layer", "num_layers", 0),)
PUBLISHED_THETA = 10000.0  # of the queries' positions, whatever the target's is
_OWN_KEYS = r"cross_attn\.(k|v)_proj\."


def _derive(sizes: Sizes) -> None:
    derive_decoder(sizes)
    heads, hidden = sizes["large_heads"], sizes["target_hidden"]
    if not sizes["large_head_dim"]:
        sizes["large_head_dim"] = hidden // heads if hidden and heads else None
    sizes["large_width"] = times(heads, sizes["large_head_dim"])


def _check_own_keys(case: Case) -> Iterator[Finding]:
    """Keys and values in the cross-attention, which would not be the target's."""
    keys = [k for k in case.files.headers if re.search(_OWN_KEYS, k)]
    if keys:
        todo = "It is not a GLIDE drafter: its cross-attention does not read the target's cache."
        got = f"keys and values of its own ({len(keys)} keys)"
        yield finding("error", case.place(keys[0]), got, "none: the target's last cache is read", todo)


def _check_heads(case: Case) -> Iterator[Finding]:
    """The cross-attention's queries go with the heads of the target's cache."""
    target, sizes = case.target, case.sizes
    if target is None:
        return
    todo = "It was trained for another target: give the model that it belongs to."
    for key, name, want in (
        ("large_num_attention_heads", "large_heads", target.dims.num_heads),
        ("large_head_dim", "large_head_dim", target.dims.head_dim),
    ):
        if sizes.get(name) not in (None, want):
            yield finding("error", case.config_place(key), str(sizes[name]), f"{want}, as {target.name} has", todo)


def _check_groups(case: Case) -> Iterator[Finding]:
    """A target with fewer key heads than query heads, which published code does not handle."""
    target, stated = case.target, case.sizes.get("large_kv_heads")
    if target is None or (target.dims.num_kv_heads == target.dims.num_heads and not stated):
        return
    want, where = target.dims.num_kv_heads, case.config_place("large_num_key_value_heads")
    if stated and stated != want:
        todo = "It was trained for another target: give the model that it belongs to."
        yield finding("error", where, str(stated), f"{want}, as {target.name} has", todo)
    elif not stated:
        got, expected = "nothing", f"{want}, the key heads of {target.name}"
        todo = "Published code takes one key head a query head. Say so in config.json if it was trained with groups."
        yield finding("warning", where, got, expected, todo)


def _check_positions(case: Case) -> Iterator[Finding]:
    """The queries are rotated as the keys in the target's cache are."""
    config = case.target.config if case.target is not None else {}
    want = lookup(config, "rope_parameters.rope_theta") or config.get("rope_theta")
    stated, where = case.config.get("large_rope_theta"), case.config_place("large_rope_theta")
    if case.target is None or want is None or float(want) == float(stated or PUBLISHED_THETA):
        return
    expected = f"{want}, the rope_theta of {case.target.name}"
    if stated is not None:
        todo = "It was trained for another target: give the model that it belongs to."
        yield finding("error", where, str(stated), expected, todo)
    else:
        todo = (
            f"Published code rotates queries by {PUBLISHED_THETA:g}. Say so in config.json if it was trained otherwise."
        )
        yield finding("warning", where, "nothing", expected, todo)


def _ours(case: Case) -> dict[str, Any]:
    sizes = case.sizes
    large_kv_heads = sizes["large_kv_heads"] or (case.target.dims.num_kv_heads if case.target else 0)
    return {
        **decoder_config(case.config),
        "model_type": "llama",
        "num_hidden_layers": sizes["num_layers"],
        "vocab_size": sizes["vocab"],
        "tie_word_embeddings": bool(sizes["is_tied"]),
        "large_hidden_size": sizes["target_hidden"],
        "large_num_attention_heads": sizes["large_heads"],
        "large_head_dim": sizes["large_head_dim"],
        "large_rope_theta": case.config.get("large_rope_theta", PUBLISHED_THETA),
        **({"large_num_key_value_heads": large_kv_heads} if large_kv_heads else {}),
    }


def _config(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    return dict(config)


FORMATS = (
    Format(
        "glide/ours",
        "GLIDE drafter (ColossalAI)",
        "glide",
        (
            *decoder_sizes(),
            Size("vocab", ("vocab_size",), stored=((r"embed_tokens\.weight$", 0),)),
            Size("num_layers", ("num_hidden_layers",), count=r"^model\.layers\.(\d+)\."),
            Size("target_hidden", ("large_hidden_size",)),
            Size("large_heads", ("large_num_attention_heads",)),
            Size("large_head_dim", ("large_head_dim",), default=0, least=0),
            Size("large_kv_heads", ("large_num_key_value_heads",), default=0, least=0),
            flag("is_tied", "tie_word_embeddings"),
        ),
        (
            Row("model.embed_tokens.weight", ("vocab", "hidden")),
            *decoder_rows(_LAYER, _OVER),
            Row(f"{_LAYER}.cross_attn.q_proj.weight", ("large_width", "hidden"), _OVER),
            Row(f"{_LAYER}.cross_attn.o_proj.weight", ("hidden", "large_width"), _OVER),
            Row("model.norm.weight", ("hidden",)),
            Row("lm_head.weight", ("vocab", "hidden"), need="!is_tied"),
            Row("lm_head.weight", ("vocab", "hidden"), need="is_tied", fallback="model.embed_tokens.weight"),
        ),
        (
            *COMMON,
            Check("glide.own_keys", _check_own_keys),
            Check("glide.heads", _check_heads),
            Check("glide.groups", _check_groups),
            Check("glide.positions", _check_positions),
        ),
        marks=(r"cross_attn\.",),
        config_marks=(),
        ignored=(r"rotary_emb\.inv_freq$", _OWN_KEYS),
        derive=_derive,
        ours=_ours,
        config=_config,
    ),
)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and weights in our layout; see `doctor.doctor.read_speculator`."""
    return read_speculator(folder, FORMATS)
