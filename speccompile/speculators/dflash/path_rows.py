# SPDX-License-Identifier: Apache-2.0
"""Domino's head on disk: sizes, keys, and the check of its config. Needs no torch.

Its first releases have the keys under `logit_head.`. Wrong config of slots and rows is in no tensor and loads.
"""

from __future__ import annotations

from collections.abc import Iterator

from speccompile.doctor.findings import Finding
from speccompile.doctor.layouts import Case, Row, Size, Sizes, finding, flag
from speccompile.speculators.dflash.drafter import NESTED, has_path, value_of

_TODO = "Correct config.json, or override it with --set."
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
