# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr's layers over candidates and Domino's head on disk: sizes, keys, checks of the config. Needs no torch.

Half of their config is in no tensor: a wrong scale of the scores, or number of heads or slots, loads. Domino's
first releases have the keys under `logit_head.`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from speccompile.checkpoints.checkpoint import MAX_SIZE
from speccompile.doctor.findings import Finding
from speccompile.doctor.layouts import Case, Row, Size, Sizes, finding, flag
from speccompile.speculators.dflash.drafter import CORRECTOR_KEYS, NESTED, has_path, is_corrected, value_of

_TODO = "Correct config.json, or override it with --set."
_STEM = "lilicorr"
_OTHERS = "It is built here; vLLM and SGLang refuse it."
_MOST_ELSEWHERE = 16  # candidates that vLLM's loader allows, in powers of two


def corrector_sizes() -> tuple[Size, ...]:
    """Returns the sizes of the layers; 0 without them."""

    def size(name: str, field: str, stored: str = "", axis: int = 0, count: str = "") -> Size:
        key = CORRECTOR_KEYS[field][0] if field else ""
        keys = (f"{NESTED}.{key}", key) if key else ()
        stored_in = ((rf"^{_STEM}\.{stored}$", axis),) if stored else ()
        return Size(name, keys, stored_in, count, default=0, least=0)

    return (
        flag("has_corrector", present=rf"^{_STEM}\."),
        size("lattice_candidates", "num_candidates", "rank_embedding", 3),
        size("lattice_width", "hidden_size", r"pass_hidden_proj\.weight"),
        size("lattice_layers", "num_layers", count=rf"^{_STEM}\.layers\.(\d+)\."),
        size("lattice_heads", "num_heads", "relative_slot_bias"),
        size("lattice_factors", "factor_dim", r"out_head\.weight"),
        size("lattice_inner", "", r"layers\.0\.mlp\.0\.weight"),
    )


def derive_corrector(sizes: Sizes) -> None:
    """Add the width where it is the drafter's, and what follows from it and from the block."""
    sizes["lattice_width"] = sizes["lattice_width"] or sizes["hidden"]
    width, block = sizes["lattice_width"], sizes["block"]
    sizes["lattice_triple"] = None if width is None else 3 * width
    sizes["lattice_slots"] = None if block is None else block - 1
    sizes["lattice_distances"] = None if block is None else 2 * block - 1
    sizes["has_token_proj"] = int(bool(sizes["has_corrector"]) and width != sizes["hidden"])


def corrector_rows() -> tuple[Row, ...]:
    """Returns the keys."""

    def linear(name: str, out: str, into: str | int, need: str = "has_corrector") -> tuple[Row, ...]:
        stem = f"{_STEM}.{name}"
        return Row(f"{stem}.weight", (out, into), need=need), Row(f"{stem}.bias", (out,), need=need)

    def plain(name: str, *dims: str | int, over: tuple[tuple[str, str, int], ...] = ()) -> Row:
        return Row(f"{_STEM}.{name}", dims, over, need="has_corrector")

    def of_layer(name: str, *dims: str | int) -> Row:
        return plain(f"layers.{{i}}.{name}", *dims, over=(("i", "lattice_layers", 0),))

    width, triple, inner = "lattice_width", "lattice_triple", "lattice_inner"
    return (
        *linear("token_proj", width, "hidden", "has_token_proj"),
        *linear("pass_hidden_proj", width, "hidden"),
        *(plain(f"feature_mlp.0.{part}", 5) for part in ("weight", "bias")),
        *linear("feature_mlp.1", width, 5),
        *linear("feature_mlp.3", width, width),
        plain("slot_embedding", 1, 1, "lattice_slots", 1, width),
        plain("rank_embedding", 1, 1, 1, "lattice_candidates", width),
        plain("relative_slot_bias", "lattice_heads", "lattice_distances"),
        plain("same_slot_bias", "lattice_heads"),
        *linear("context_proj", width, "hidden"),
        of_layer("attn_norm.weight", width),
        of_layer("attn.in_proj_weight", triple, width),
        of_layer("attn.in_proj_bias", triple),
        of_layer("attn.out_proj.weight", width, width),
        of_layer("attn.out_proj.bias", width),
        of_layer("mlp_norm.weight", width),
        *(of_layer(f"mlp.{i}.weight", out, into) for i, out, into in ((0, inner, width), (2, width, inner))),
        *(of_layer(f"mlp.{i}.bias", out) for i, out in ((0, inner), (2, width))),
        plain("output_norm.weight", width),
        plain("anchor_norm.weight", width),
        *linear("factor_input_proj", width, triple),
        *(row for name in ("out_head", "in_head", "anchor_out_head") for row in linear(name, "lattice_factors", width)),
    )


def check_corrector(case: Case) -> Iterator[Finding]:
    """Yields findings for layers without their config or a config without layers, and for values that cannot be."""
    has_keys, where = bool(case.sizes["has_corrector"]), case.where_in_config("lilicorr_enabled")
    if has_keys != is_corrected(case.config):
        got, expected = ("a DFlash drafter", "LiLiCorr") if has_keys else ("LiLiCorr", "a DFlash drafter")
        todo = "Fetch the folder again: config and weights are of different drafters."
        yield finding("error", where, got, f"{expected}, as its keys say", todo)
    if not has_keys:
        return
    for field, (key, least) in CORRECTOR_KEYS.items():
        value = value_of(case.config, key)
        if not _is_number(value, least):
            todo = "Ask its author: it is needed, and others refuse to guess it." if value is None else _TODO
            got = "nothing" if value is None else repr(value)
            yield finding("error", case.where_in_config(key), got, f"a number, {least} or more ({field})", todo)
    yield from _check_widths(case)
    num = case.sizes["lattice_candidates"] or 0
    if num > _MOST_ELSEWHERE or num & (num - 1):
        expected = f"a power of two up to {_MOST_ELSEWHERE}, as other engines require"
        yield finding("warning", case.where_in_config(CORRECTOR_KEYS["num_candidates"][0]), f"{num}", expected, _OTHERS)
    yield from own_tables(case, "candidates are the target's LM head's, with its embeddings")


def _is_number(value: Any, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= MAX_SIZE


def _check_widths(case: Case) -> Iterator[Finding]:
    sizes, ratio = case.sizes, value_of(case.config, CORRECTOR_KEYS["mlp_ratio"][0])
    width, heads, inner = sizes["lattice_width"], sizes["lattice_heads"], sizes["lattice_inner"]
    if width and heads and width % heads:
        where = case.where_in_config(CORRECTOR_KEYS["num_heads"][0])
        yield finding("error", where, f"{heads}", f"a divisor of the width {width}", _TODO)
    if width and inner and _is_number(ratio, 0) and int(width * ratio) != inner:
        where, expected = case.where_in_config(CORRECTOR_KEYS["mlp_ratio"][0]), f"{inner / width:g}, as stored"
        yield finding("error", where, repr(ratio), expected, _TODO)


OLD = "logit_head."
TABLES = ("embed_tokens.weight", "lm_head.weight")


def path_sizes() -> tuple[Size, ...]:
    """Returns the sizes of the head; 0 without it."""

    def size(name: str, key: str, stored: str, axis: int) -> Size:
        return Size(name, (f"{NESTED}.{key}", key), ((stored, axis),), default=0, least=0)

    return (
        flag("has_path", present=r"^(logit_head\.)?prefix_gru\."),
        flag("has_old_path", present=r"^logit_head\.prefix_gru\."),
        size("path_state", "gru_hidden_dim", r"prefix_gru\.weight_hh_l0$", 1),
        size("path_width", "emb_dim", r"embed_proj\.0\.weight$", 0),
    )


def derive_path(sizes: Sizes) -> None:
    state, hidden = sizes["path_state"], sizes["hidden"]
    sizes["path_gates"] = None if state is None else 3 * state
    sizes["path_inputs"] = None if state is None or hidden is None else hidden + state
    sizes["has_new_path"] = int(bool(sizes["has_path"]) and not sizes["has_old_path"])


def path_rows() -> tuple[Row, ...]:
    """Returns the keys, with and without the prefix of the first releases."""
    kinds = (
        ("prefix_gru.weight_ih_l0", ("path_gates", "hidden")),
        ("prefix_gru.weight_hh_l0", ("path_gates", "path_state")),
        ("embed_proj.0.weight", ("path_width", "path_inputs")),
        ("embed_proj.2.weight", ("vocab", "path_width")),
    )
    return (
        *(Row(key, dims, need="has_new_path") for key, dims in kinds),
        *(Row(OLD + key, dims, name=key, need="has_old_path") for key, dims in kinds),
    )


def check_path(case: Case) -> Iterator[Finding]:
    """Yields findings for a head without its config or the other way, and for values that contradict or are missing."""
    has_keys = bool(case.sizes["has_path"])
    if has_keys != has_path(case.config):
        got, expected = ("a DFlash drafter", "domino") if has_keys else ("domino", "a DFlash drafter")
        todo = "Fetch the folder again: config and weights are of different drafters."
        yield finding("error", case.where_in_config("projector_type"), got, f"{expected}, as its keys say", todo)
    if not has_keys:
        return
    shift, stated = (value_of(case.config, name) for name in ("shift_label", "sample_from_anchor"))
    if shift is not None and stated is not None and bool(shift) != bool(stated):
        where = case.where_in_config("shift_label", "sample_from_anchor")
        yield finding(
            "error", where, f"{shift} and {stated}", "the same: both say whether the root's row drafts", _TODO
        )
    if shift is None and stated is None:
        todo = "Ask its author: released drafters have true, and readers take false where it is missing."
        yield finding("warning", case.where_in_config("shift_label"), "nothing", "true or false", todo)
    num, block = value_of(case.config, "pure_draft_prefix_len"), case.sizes["block"] or 0
    if num is None or isinstance(num, bool) or not isinstance(num, int) or not 0 <= num < block:
        got = "nothing" if num is None else repr(num)
        expected = f"how many first slots are not corrected, 0 to {block - 1}"
        yield finding("error", case.where_in_config("pure_draft_prefix_len"), got, expected, _TODO)
    yield from own_tables(case, "paths are embedded as the target's tokens")


def own_tables(case: Case, reason: str) -> Iterator[Finding]:
    """Yields errors for embeddings or an LM head of its own beside a head that was trained on the target's."""
    for name in TABLES:
        if (stored := case.key_of(name)) is not None:
            todo = "Use a drafter that shares the target's tables."
            yield finding("error", case.where(stored), "a table of its own", f"none: {reason}", todo)
